"""Assembles the modules of an adapter from named tensors, with their shapes, ranks and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplex.adapter_format import tensor_names as parts
from loraplex.adapter_format.config import CONFIG_FILE, AdapterConfig
from loraplex.adapter_format.experts import (
    FusedExperts,
    is_expert,
    is_fused_half,
    take_fused,
    targets_parameter,
)
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.geometry import (
    EMBEDDING,
    HEAD,
    LM_HEAD,
    NORM,
    Geometry,
    Module,
    kind_of_matrix,
)
from loraplex.adapter_format.module_parts import ModuleParts, trains_tokens
from loraplex.adapter_format.patterns import PatternMap, pattern_map
from loraplex.adapter_format.regex import BadPattern
from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, Header, TensorInfo
from loraplex.adapter_format.tasks import SAVED_HEADS, SCORE, SEQ_CLS
from loraplex.adapter_format.tensor_names import BadTensorName, split_tensor_name
from loraplex.adapter_format.text_model import is_in_tower

CANNOT_ADAPT = (
    "is on a module of the base that workers cannot adapt; leave it out of target_modules and "
    "modules_to_save, and train with bias='none'"
)
_OF_ANOTHER_BASE = "is for a module that the base does not have; is this the right base?"
Tensors = dict[str, TensorInfo]
"""The tensors of one module, by part."""
_OF_TINKER = (
    ".in_proj_k", ".in_proj_q", ".in_proj_v", ".unembed_tokens",
    ".experts.w1", ".experts.w2", ".experts.w3",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Factors:
    """The rank and the alpha that the config gives to each module."""

    config: AdapterConfig
    ranks: PatternMap[int]
    alphas: PatternMap[float]

    def rank(self, name: str) -> int:
        own = self.ranks.first_match(name)
        return self.config.r if own is None else own

    def scale(self, name: str, rank: int) -> float:
        own = self.alphas.first_match(name)
        alpha = self.config.lora_alpha if own is None else own
        return alpha / math.sqrt(rank) if self.config.use_rslora else alpha / rank


def build_modules(
    config: AdapterConfig,
    header: Header,
    geometry: Geometry | None,
    max_rank: int,
    findings: Findings,
) -> tuple[AdapterModule, ...]:
    """Assemble the modules of an adapter, refusing every tensor that belongs to none.

    Returns: the modules in order of their names; fewer than the file holds where `findings` has
        refusals.
    """
    base = {module.name: module for module in geometry.modules} if geometry else None
    modules: list[AdapterModule] = []
    try:
        ranks, alphas = pattern_map(config.rank_pattern), pattern_map(config.alpha_pattern)
        factors = _Factors(config, ranks, alphas)
        by_module = _tensors_by_module(header, findings)
        _drop_rows_of_tied_head(by_module, geometry, config)
        for fused in take_fused(by_module, base, config, findings):
            modules += _describe_fused(fused, factors, findings)
        for name, tensors in sorted(by_module.items()):
            module = _base_module(name, tensors, base, config, findings)
            if module is None or _is_refused(module, tensors, config, findings):
                continue
            found = ModuleParts(module, tensors, config)
            if found.check(findings):
                modules.append(_describe(found, factors, findings))
    except BadPattern as error:
        findings.refuse(f"{CONFIG_FILE}:rank_pattern", len(config.rank_pattern), str(error))
    _check_ranks(modules, max_rank, findings)
    for name in [m.name for m in modules if base and m.name in base and base[m.name].is_fixed]:
        findings.refuse(f"{TENSOR_FILE}:{name}", name, CANNOT_ADAPT)
    if not any(module.rank for module in modules) and not findings.refusals:
        findings.refuse(TENSOR_FILE, "0 modules", "adapts no module of the base")
    return tuple(sorted(modules, key=lambda module: module.name))


def _tensors_by_module(header: Header, findings: Findings) -> dict[str, Tensors]:
    result: dict[str, Tensors] = {}
    for info in header.tensors:
        try:
            name = split_tensor_name(info.name)
        except BadTensorName as error:
            findings.refuse(_path(info), info.name, str(error))
            continue
        result.setdefault(name.module, {})[name.part] = info
    return result


def _drop_rows_of_tied_head(
    by_module: dict[str, Tensors], geometry: Geometry | None, config: AdapterConfig
) -> None:
    """Alongside a resized table PEFT writes the rows trained in the embedding again for the head
    tied to it, and does not read them from there."""
    may_be_tied = geometry is None or geometry.tied_embeddings
    if not (may_be_tied and config.trainable_token_indices):
        return
    for name in [name for name in by_module if kind_of_matrix(name) == LM_HEAD]:
        if parts.TOKEN_DELTA in by_module[name] and not trains_tokens(config, name):
            repeated = {parts.TOKEN_DELTA, parts.BASE_WEIGHT}
            by_module[name] = {p: t for p, t in by_module[name].items() if p not in repeated}


def _path(info: TensorInfo) -> str:
    return f"{TENSOR_FILE}:{info.name}"


def _base_module(
    name: str,
    tensors: Tensors,
    base: Mapping[str, Module] | None,
    config: AdapterConfig,
    findings: Findings,
) -> Module | None:
    """The module of the base; without a geometry, the module that the tensors imply."""
    if base is None:
        return _implied_module(name, tensors, config)
    module = base.get(name)
    if module is None:
        why = _why_unknown(name, config)
        refuse = findings.misfit if why is _OF_ANOTHER_BASE else findings.refuse
        for info in tensors.values():
            refuse(_path(info), name, why)
    return module


def _why_unknown(name: str, config: AdapterConfig) -> str:
    if name in SAVED_HEADS and config.task != SEQ_CLS:
        return f"is a head, which needs task_type {SEQ_CLS}; correct adapter_config.json"
    if name in SAVED_HEADS:
        return f"is a head of another model class: those of the served bases are called {SCORE!r}"
    if is_in_tower(name):
        return (
            "is in a vision or audio tower, and only the text model is served; upload with "
            "--text-only to leave it out, or train LoRA on the text model alone (target_modules as "
            "a regular expression with language_model)"
        )
    if name.endswith(_OF_TINKER):
        return "is a name of Tinker's exports; upload with --convert, which renames it"
    if name.rpartition(".")[2] == "conv1d":
        return (
            "is on a convolution, of which transformers reads the weight alone, so that LoRA there "
            "has no effect; take conv1d out of target_modules and modules_to_save"
        )
    return _OF_ANOTHER_BASE


def _implied_module(name: str, tensors: Tensors, config: AdapterConfig) -> Module:
    """A module as wide as its LoRA matrices, or else as its whole weight, rows or bias."""
    inner = tensors.get(parts.A) or tensors.get(parts.EMBEDDING_A)
    outer = tensors.get(parts.B) or tensors.get(parts.EMBEDDING_B)
    outer = outer or tensors.get(parts.BIAS) or tensors.get(parts.BASE_BIAS)
    in_features = inner.shape[-1] if inner and inner.shape else 0
    out_features = outer.shape[0] if outer and outer.shape else 0
    weight = tensors.get(parts.WEIGHT) or tensors.get(parts.BASE_WEIGHT)
    kind = NORM if weight and len(weight.shape) == 1 else kind_of_matrix(name)
    if name == SCORE and config.task == SEQ_CLS:
        kind = HEAD
    weight = weight or tensors.get(parts.TOKEN_DELTA)
    if weight and weight.shape and not inner:
        out_features, in_features = weight.shape[0], weight.shape[-1]
        if kind == EMBEDDING:
            out_features, in_features = in_features, out_features
    return Module(name, kind, in_features, out_features, has_bias=True)


def _is_refused(
    module: Module, tensors: Tensors, config: AdapterConfig, findings: Findings
) -> bool:
    """Refuse all tensors of a module that takes no such adapter. True if it was refused."""
    why = _why_refused(module, tensors, config)
    for info in tensors.values() if why else ():
        findings.refuse(_path(info), module.name, why or "")
    return why is not None


def _why_refused(module: Module, tensors: Tensors, config: AdapterConfig) -> str | None:
    has_lora = any(part in parts.LORA_PARTS for part in tensors)
    if module.kind == NORM and has_lora:
        return "is LoRA on a norm of the base, which takes none; correct target_modules"
    if module.kind in (EMBEDDING, LM_HEAD) and config.alora_invocation_tokens:
        return "acts on whole requests, but an activated LoRA does not; leave the module out"
    if not is_expert(module.name):
        return None
    if parts.WEIGHT in tensors:
        return "is a whole weight of an expert, which is not served; train LoRA on experts instead"
    if config.use_dora or config.lora_bias:
        return "on experts goes with neither use_dora nor lora_bias, in PEFT either; train without"
    if is_fused_half(module.name) and config.use_rslora:
        return "with use_rslora is scaled otherwise by PEFT for transformers 5; train without it"
    return None


def _check_ranks(modules: Sequence[AdapterModule], max_rank: int, findings: Findings) -> None:
    """Refuse an adapter for its largest rank, once for all modules."""
    largest = max(modules, key=lambda module: module.rank, default=None)
    if largest is not None and largest.rank > max_rank:
        hint = f"is more than the {max_rank} that is served; train with a smaller r"
        findings.refuse(f"{CONFIG_FILE}:r", f"rank {largest.rank} of {largest.name}", hint)


def _describe_fused(
    fused: FusedExperts, factors: _Factors, findings: Findings
) -> list[AdapterModule]:
    """One module per expert.

    Raises:
        BadPattern: the patterns of the config take too long.
    """
    rank = factors.rank(fused.parameter)
    fused = fused.counted(rank)
    problem = fused.problem(rank)
    if problem is not None:
        info, why = problem
        findings.refuse(_path(info), list(info.shape), why)
        return []
    scale = factors.scale(fused.parameter, rank)
    a, b = fused.tensors[parts.A], fused.tensors[parts.B]
    return [
        AdapterModule(name, rank, scale, a=a, b=b, expert=share) for name, share in fused.shares()
    ]


def _describe(found: ModuleParts, factors: _Factors, findings: Findings) -> AdapterModule:
    """The module with the rank and scale that the config gives it.

    Raises:
        BadPattern: the patterns of the config take too long.
    """
    name, tensors = found.module.name, found.tensors
    key, weight = name, f"{name}.weight"
    if targets_parameter(found.config, weight):
        key = weight
    rank = factors.rank(key) if found.has_lora else 0
    found.check_shapes(rank, findings)
    return AdapterModule(
        name=name,
        rank=rank,
        scale=factors.scale(key, rank) if rank else 0.0,
        a=tensors.get(parts.A),
        b=tensors.get(parts.B),
        magnitude=tensors.get(parts.MAGNITUDE),
        lora_bias=tensors.get(parts.LORA_BIAS),
        embedding_a=tensors.get(parts.EMBEDDING_A),
        embedding_b=tensors.get(parts.EMBEDDING_B),
        token_delta=tensors.get(parts.TOKEN_DELTA),
        token_ids=found.token_ids if parts.TOKEN_DELTA in tensors else (),
        full=tensors.get(parts.WEIGHT),
        base_copy=tensors.get(parts.BASE_WEIGHT) or tensors.get(parts.ORIGINAL),
        bias=tensors.get(parts.BIAS) or tensors.get(parts.BASE_BIAS),
    )
