"""Validates an adapter: is it a PEFT LoRA that can be served exactly as it was trained?

A pure function over the config's bytes, the tensor file's header and the base's geometry, shared by
the command line (offline), the registry (before publishing) and the worker (before loading). The
tensors' values are checked separately by `tensor_scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loraplex.adapter_format.added_tokens import TOKENIZER_FILES
from loraplex.adapter_format.config import CONFIG_FILE, AdapterConfig, parse_config
from loraplex.adapter_format.files import File, check_files
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.geometry import Geometry
from loraplex.adapter_format.modules import build_modules
from loraplex.adapter_format.pooling_fields import check_labels
from loraplex.adapter_format.report import AdapterModule, Report
from loraplex.adapter_format.safetensors_header import Header, parse_header
from loraplex.adapter_format.serving_fields import check_eos_token_ids, check_rope_scaling
from loraplex.adapter_format.targets import check_targets
from loraplex.adapter_format.task_geometry import geometry_of_task, in_base, num_labels_of
from loraplex.adapter_format.vocabulary import complete_tables
from loraplex.errors import InvalidAdapter, Violation
from loraplex.units import counted

MAX_RANK = 256
_OF_TRAINING = ".lora_velora_embed"
"""Ends names of tensors that only a backward pass reads (VeLoRA); PEFT writes them with LoRA."""


def validate(
    config_bytes: bytes,
    header_prefix: bytes,
    tensor_file_size: int,
    files: Sequence[File],
    geometry: Geometry | None = None,
    max_rank: int = MAX_RANK,
    strict: bool = False,
    *,
    base_names: Sequence[str] = (),
    allow_missing: bool = False,
) -> Report:
    """Check an adapter and describe it.

    Args:
        config_bytes: content of adapter_config.json.
        header_prefix: the first bytes of adapter_model.safetensors, as many as
            `safetensors_header.prefix_bytes` says; more are ignored.
        tensor_file_size: size of adapter_model.safetensors in bytes.
        files: all files of the adapter; empty skips the check of names, sizes and digests.
        geometry: the base; None checks what can be checked without one.
        max_rank: the largest rank that is served.
        strict: whether warnings refuse too.
        base_names: the base's id and other names, for errors.
        allow_missing: whether modules that the config selects may have no tensors.

    Raises:
        InvalidAdapter: with every violation found, each naming field, value and the way out.
    """
    findings = Findings()
    if files:
        check_files(files, findings)
    config = _read_config(config_bytes, findings)
    header = _read_header(header_prefix, tensor_file_size, findings)
    findings.raise_if_refused()
    assert config is not None and header is not None, "refused above"
    findings.warnings.extend(config.warnings)
    own = None if geometry is None else geometry_of_task(geometry, config, header, findings)
    modules = build_modules(config, header, own, max_rank, findings)
    check_targets(config, modules, own, findings, allow_missing=allow_missing)
    if own is not None:
        modules = _check_vocabulary(config, modules, own, files, findings)
        check_rope_scaling(config.rope_scaling, own.rotary_pairs, findings)
    modules = in_base(modules, config, header, geometry)
    num_labels = num_labels_of(modules, config.task)
    check_labels(config.pooling, num_labels, findings, CONFIG_FILE)
    if findings.misfits and base_names:
        _name_wrong_base(config, base_names, findings)
    findings.raise_if_refused(strict=strict)
    return Report(
        config=config,
        modules=modules,
        max_rank=max(module.rank for module in modules),
        num_modules=sum(module.rank > 0 for module in modules),
        tensor_file_size=tensor_file_size,
        base_fingerprint=geometry.fingerprint if geometry else "",
        num_labels=num_labels,
        warnings=tuple(findings.warnings),
    )


def _check_vocabulary(
    config: AdapterConfig,
    modules: tuple[AdapterModule, ...],
    geometry: Geometry,
    files: Sequence[File],
    findings: Findings,
) -> tuple[AdapterModule, ...]:
    """The modules with the sizes of their tables, which EOS ids must fit."""
    brings = any(file.path in TOKENIZER_FILES for file in files)
    modules = complete_tables(modules, geometry, config, findings, brings_tokenizer=brings)
    sizes = (module.num_rows for module in modules)
    check_eos_token_ids(config.eos_token_ids, geometry.vocab_size, sizes, findings)
    return modules


def _name_wrong_base(config: AdapterConfig, base_names: Sequence[str], findings: Findings) -> None:
    """Say in one sentence that the adapter was trained on another base. Mutates: findings."""
    named = config.base_model_name_or_path or ""
    if {named, named.rstrip("/").rpartition("/")[2]} & set(base_names):
        return
    first = findings.misfits[0]
    trained = f"the adapter was trained on {named}" if named else "the adapter names no base"
    findings.name_base(
        Violation.of(
            f"{CONFIG_FILE}:base_model_name_or_path",
            named,
            f"{trained} and was checked against {base_names[0]}, which it does not fit "
            f"in {counted(len(findings.misfits), 'tensor')}, such as {first.field} = "
            f"{first.value}, which {first.description}; choose the right base with --base",
        )
    )


def _read_config(config_bytes: bytes, findings: Findings) -> AdapterConfig | None:
    try:
        return parse_config(config_bytes)
    except InvalidAdapter as error:
        findings.include(error)
        return None


def _read_header(prefix: bytes, file_size: int, findings: Findings) -> Header | None:
    try:
        header = parse_header(prefix, file_size)
        kept = tuple(info for info in header.tensors if not info.name.endswith(_OF_TRAINING))
        return replace(header, tensors=kept)
    except InvalidAdapter as error:
        findings.include(error)
        return None
