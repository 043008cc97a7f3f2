"""Compares an adapter's tensors with the modules that its config selects, by PEFT's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loraplex.adapter_format.config import CONFIG_FILE, AdapterConfig
from loraplex.adapter_format.experts import (
    ROUTERS,
    is_expert,
    parameter_part,
    targets_parameter,
)
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.geometry import EMBEDDING, LINEAR, LM_HEAD, Geometry, Module
from loraplex.adapter_format.module_parts import saves, trains_tokens
from loraplex.adapter_format.patterns import DEFAULT_TARGETS, Names, Selector
from loraplex.adapter_format.regex import BadPattern
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE


def check_targets(
    config: AdapterConfig,
    modules: Sequence[AdapterModule],
    geometry: Geometry | None,
    findings: Findings,
    *,
    allow_missing: bool,
) -> None:
    """Refuse LoRA that PEFT would not load, and selected modules without tensors.

    Args:
        allow_missing: only warn of the latter, unless PEFT would make them random.
    """
    base = {module.name: module for module in geometry.modules} if geometry else {}
    _refuse_incomplete(config, modules, base, findings)
    _note_lost_biases(config, modules, base, findings)
    targets = _effective_targets(config, geometry, findings)
    if targets is None:
        return
    selector = selector_of(config, targets)
    adapted = {module.name: module for module in modules if module.rank}
    try:
        for module in adapted.values():
            if not _is_selected(config, selector, module, base):
                _refuse_unselected(module, findings)
            elif _is_selected_twice(config, selector, module, base):
                _refuse_selected_twice(module, findings)
        selected = _selected_names(config, selector, adapted, base)
        missing = [name for name in selected if name not in adapted]
        if missing and not findings.refusals:
            _note_missing(config, missing, len(selected), findings, allow_missing=allow_missing)
    except BadPattern as error:
        findings.refuse(f"{CONFIG_FILE}:target_modules", targets, str(error))


def _selected_names(
    config: AdapterConfig,
    selector: Selector,
    adapted: Mapping[str, AdapterModule],
    base: Mapping[str, Module],
) -> list[str]:
    """The modules of the base that target_modules and target_parameters select."""
    linear = [name for name, module in base.items() if module.kind == LINEAR]
    parts = dict(map(parameter_part, linear)) if config.target_parameters else {}
    if not any(is_expert(name) for name, module in adapted.items() if module.expert is None):
        # Trained with transformers 5, where experts are not linears. No name selects them, not even
        # one that also names a linear of a shared expert or of a dense layer.
        linear = [name for name in linear if not is_expert(name)]
    selected = [name for name in linear if selector.selects(name, base[name])]
    return selected + [part for part, name in parts.items() if targets_parameter(config, name)]


def _note_lost_biases(
    config: AdapterConfig,
    modules: Sequence[AdapterModule],
    base: Mapping[str, Module],
    findings: Findings,
) -> None:
    """Warn of biases that PEFT trained and did not save. Mutates: findings."""
    with_bias = {name for name, module in base.items() if module.has_bias}
    lost = [m.name for m in modules if m.rank and m.bias is None and m.name in with_bias]
    if lost and config.bias == "lora_only":
        findings.warn(
            f"{CONFIG_FILE}:bias",
            config.bias,
            f"the file has no trained bias of {lost[0]}, so the base's is used, as PEFT does; "
            "PEFT 0.10 to 0.20 trained such biases without saving them: train with a newer PEFT",
        )


def _is_selected(
    config: AdapterConfig,
    selector: Selector,
    module: AdapterModule,
    base: Mapping[str, Module],
) -> bool:
    """True if target_modules or target_parameters select it, or an embedding that it is tied to."""
    if module.expert is not None or targets_parameter(config, f"{module.name}.weight"):
        return True
    if selector.selects(module.name, base.get(module.name)):
        return True
    is_head = module.name in base and base[module.name].kind == LM_HEAD
    if not (is_head and config.ensure_weight_tying):
        return False
    embeddings = [other for other in base.values() if other.kind == EMBEDDING]
    return any(selector.selects(other.name, other) for other in embeddings)


def _is_selected_twice(
    config: AdapterConfig,
    selector: Selector,
    module: AdapterModule,
    base: Mapping[str, Module],
) -> bool:
    """True if a linear is named by target_modules and its weight by target_parameters. A router may
    be: PEFT takes it as a parameter, since transformers 5 has no linear for it."""
    if module.expert is not None or module.name.endswith(ROUTERS):
        return False
    is_parameter = targets_parameter(config, f"{module.name}.weight")
    return is_parameter and selector.selects(module.name, base.get(module.name))


def selector_of(config: AdapterConfig, targets: Names) -> Selector:
    """PEFT's rules of selection, as the config sets them."""
    excluded = config.exclude_modules
    return Selector(
        targets=targets if isinstance(targets, str) else frozenset(targets),
        excluded=excluded if isinstance(excluded, str) else frozenset(excluded),
        saved=config.modules_to_save,
        layers=frozenset(config.layers_to_transform),
        layers_pattern=config.layers_pattern,
    )


def _effective_targets(
    config: AdapterConfig, geometry: Geometry | None, findings: Findings
) -> Names | None:
    """`target_modules`, or PEFT's default for the base; None if that is not known."""
    if config.target_modules is not None or geometry is None:
        return config.target_modules
    targets = DEFAULT_TARGETS.get(geometry.model_type)
    if targets is None and config.target_parameters:
        return ()
    if targets is None:
        hint = f"is needed: PEFT has no default for {geometry.model_type!r}"
        findings.refuse(f"{CONFIG_FILE}:target_modules", None, hint)
    return targets


def _refuse_incomplete(
    config: AdapterConfig,
    modules: Sequence[AdapterModule],
    base: Mapping[str, Module],
    findings: Findings,
) -> None:
    """Refuse fully trained modules and token rows that the config promises and the file lacks."""
    found = {module.name: module for module in modules}
    for name in base:
        module = found.get(name, AdapterModule(name))
        if module.full is None and saves(config, name):
            why = "is in modules_to_save but has no weight; save the adapter again"
            findings.refuse(f"{TENSOR_FILE}:{name}", "missing", why)
        if module.token_delta is None and trains_tokens(config, name):
            why = "is in trainable_token_indices but has no trained rows; save the adapter again"
            findings.refuse(f"{TENSOR_FILE}:{name}", "missing", why)


def _refuse_unselected(module: AdapterModule, findings: Findings) -> None:
    tensor = module.a or module.embedding_a
    findings.refuse(
        f"{TENSOR_FILE}:{tensor.name if tensor else module.name}",
        module.name,
        "is not selected by target_modules (with exclude_modules, layers_to_transform and "
        "modules_to_save), so PEFT would not load it; correct adapter_config.json",
    )


def _refuse_selected_twice(module: AdapterModule, findings: Findings) -> None:
    findings.refuse(
        f"{CONFIG_FILE}:target_parameters",
        f"{module.name}.weight",
        f"is the weight of {module.name}, which target_modules selects as well; PEFT refuses both",
    )


def _note_missing(
    config: AdapterConfig,
    missing: Sequence[str],
    num_selected: int,
    findings: Findings,
    *,
    allow_missing: bool,
) -> None:
    count = f"{len(missing)} of {num_selected} modules"
    what = (
        "target_modules or target_parameters select modules that have no tensors, such as "
        f"{missing[0]}"
    )
    if config.init_is_random:
        findings.refuse(
            TENSOR_FILE, count, f"{what}, and init_lora_weights=false would make them random"
        )
    elif allow_missing:
        findings.warn(TENSOR_FILE, count, f"{what}; they stay as they are in the base")
    else:
        findings.refuse(
            TENSOR_FILE,
            count,
            f"{what}; the file is probably incomplete, so save the adapter again, or publish it as "
            "it is with --allow-missing",
        )
