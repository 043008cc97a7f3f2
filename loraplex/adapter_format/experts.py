"""LoRA on the experts of a mixture, in both forms that PEFT writes.

As linears (`experts.3.w1.lora_A.weight`): modules like any other. As parameters
(`target_parameters`): all experts of a layer in one pair of tensors, which this file takes apart
into one module per expert. A is `[experts * rank, in]`, expert by expert; B is
`[out, rank * experts]`, rank by rank. Where both parameters of a layer are targeted, PEFT nests
them: the later one (`down_proj`) lies outside, the other one under `base_layer`.

Source: peft, `tuners/lora/layer.py: ParamWrapper`, `tuners_utils._inject_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from loraplex.adapter_format import tensor_names as parts
from loraplex.adapter_format.config import CONFIG_FILE, AdapterConfig
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.geometry import Module
from loraplex.adapter_format.report import ExpertShare
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, TensorInfo

PARAMETERS = ("gate_up_proj", "down_proj")
"""Parameters in the order in which transformers' expert modules hold them, so the inner one comes
first."""
LINEARS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's linears in the files of bases: gate, up and down."""
ROUTERS = (".mlp.gate", ".mlp.router", ".block_sparse_moe.gate")
"""How names of routers end that are linears in files, but not in transformers 5."""

_FUSED = re.compile(r"(?P<container>.+\.experts)(?P<nesting>(\.base_layer)*)", re.ASCII)
_LINEAR = re.compile(r"(?P<container>.+\.experts)\.(?P<index>\d+)\.(?P<name>\w+)", re.ASCII)
_GATE_UP = "gate_up_proj"
_DOWN_NAMES = frozenset(down for _, _, down in LINEARS)

Tensors = dict[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """One stacked parameter of one layer, and the adapter's tensors for it."""

    container: str
    """Name of the container, such as `model.layers.0.mlp.experts`."""
    parameter: str
    """Full name in PEFT, against which patterns are matched."""
    tensors: Tensors
    num_experts: int
    """Number of experts; 0 without a base = as many as the tensors hold."""
    in_features: int
    out_features: int

    def counted(self, rank: int) -> FusedExperts:
        """A copy with a number of experts."""
        a = self.tensors.get(parts.A)
        rows = a.shape[0] if a and a.shape else rank
        return self if self.num_experts else replace(self, num_experts=max(1, rows // rank))

    def problem(self, rank: int) -> tuple[TensorInfo, str] | None:
        """A tensor that does not belong here, and the reason; None if all do."""
        rows = self.num_experts * rank
        expected = {parts.A: (rows, self.in_features), parts.B: (self.out_features, rows)}
        for part, info in self.tensors.items():
            if part not in expected:
                return info, "does not exist on expert parameters, in PEFT either; remove it"
            if info.shape != expected[part]:
                return info, (
                    f"must be {list(expected[part])}: {self.num_experts} experts of rank {rank} "
                    f"(r, or the first matching key of rank_pattern) for {self.parameter}"
                )
        missing = next((part for part in expected if part not in self.tensors), None)
        if missing is None:
            return None
        return next(iter(self.tensors.values())), "lacks its lora_A or lora_B; save it again"

    def shares(self) -> Iterator[tuple[str, ExpertShare]]:
        """Name and share of each expert's module."""
        _, _, name = self.parameter.rpartition(".")
        for index in range(self.num_experts):
            share = ExpertShare(index, self.num_experts, self.in_features, self.out_features)
            yield f"{self.container}.{index}.{name}", share


def is_expert(name: str) -> bool:
    """Whether a module is an expert or inside one."""
    return ".experts." in f".{name}."


def is_fused_half(name: str) -> bool:
    """Whether a module is one of those that transformers 5 fuses into `gate_up_proj`."""
    match = _LINEAR.fullmatch(name)
    return match is not None and match["name"] not in {*_DOWN_NAMES, _GATE_UP}


def parameter_part(name: str) -> tuple[str, str]:
    """The module that LoRA on the parameter of a base's linear makes, and the parameter's name
    in transformers, where all experts of a layer are one parameter."""
    match = _LINEAR.fullmatch(name)
    if match is None:
        return name, f"{name}.weight"
    container, parameter = match["container"], _GATE_UP
    if match["name"] in _DOWN_NAMES:
        parameter = "down_proj"
    return f"{container}.{match['index']}.{parameter}", f"{container}.{parameter}"


def targets_parameter(config: AdapterConfig, parameter: str) -> bool:
    """Whether `target_parameters` names a parameter, by PEFT's rule."""
    names = config.target_parameters
    return parameter in names or any(parameter.endswith(f".{name}") for name in names)


def take_fused(
    by_module: dict[str, Tensors],
    base: Mapping[str, Module] | None,
    config: AdapterConfig,
    findings: Findings,
) -> list[FusedExperts]:
    """Take tensors of fused experts out of `by_module`, which is mutated.

    Tensors that no parameter of the base explains are refused.
    """
    nested: dict[str, dict[int, Tensors]] = {}
    for name in sorted(by_module):
        match = _FUSED.fullmatch(name)
        if match is not None:
            depth = match["nesting"].count(".base_layer")
            nested.setdefault(match["container"], {})[depth] = by_module.pop(name)
    shapes = None if base is None else _shapes(base)
    found: list[FusedExperts] = []
    for container, by_depth in nested.items():
        targeted = [p for p in PARAMETERS if targets_parameter(config, f"{container}.{p}")]
        if sorted(by_depth) != list(range(len(targeted))):
            _refuse_all(by_depth, "is LoRA on expert parameters that target_parameters", findings)
            continue
        for depth, parameter in enumerate(reversed(targeted)):
            fused = _fused(container, parameter, by_depth[depth], shapes)
            if fused is None:
                _refuse_all(by_depth, "is LoRA on experts that the base", findings)
            else:
                found.append(fused)
    return found


def _fused(
    container: str,
    parameter: str,
    tensors: Tensors,
    shapes: dict[tuple[str, str], tuple[int, int, int]] | None,
) -> FusedExperts | None:
    peft_name = f"{container}.{parameter}"
    if shapes is None:
        return FusedExperts(container, peft_name, tensors, *_implied(tensors))
    shape = shapes.get((container, parameter))
    return None if shape is None else FusedExperts(container, peft_name, tensors, *shape)


def _implied(tensors: Tensors) -> tuple[int, int, int]:
    """The experts that the tensors imply, without a base."""
    a, b = tensors.get(parts.A), tensors.get(parts.B)
    in_features = a.shape[-1] if a and a.shape else 0
    return 0, in_features, b.shape[0] if b and b.shape else 0


def _shapes(base: Mapping[str, Module]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Number of experts, inputs and outputs of each (container, parameter)."""
    counts: dict[str, int] = {}
    widths: dict[tuple[str, str], tuple[int, int]] = {}
    for name, module in base.items():
        match = _LINEAR.fullmatch(name)
        if match is None:
            continue
        container = match["container"]
        counts[container] = max(counts.get(container, 0), int(match["index"]) + 1)
        if match["name"] in _DOWN_NAMES:
            widths[container, "down_proj"] = module.in_features, module.out_features
        else:
            halves = 1 if match["name"] == _GATE_UP else 2
            widths[container, _GATE_UP] = module.in_features, halves * module.out_features
    return {key: (counts[key[0]], *pair) for key, pair in widths.items()}


def _refuse_all(by_depth: dict[int, Tensors], why: str, findings: Findings) -> None:
    hint = f"{why} does not have; correct {CONFIG_FILE}, or the choice of the base"
    for tensors in by_depth.values():
        for info in tensors.values():
            findings.refuse(f"{TENSOR_FILE}:{info.name}", info.name, hint)
