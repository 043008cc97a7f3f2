"""TensorRT-LLM's module ids 0 to 17, and the modules of a base that they correspond to.

The meaning of each id is that of TensorRT-LLM's own converter and loader: `mlp_h_to_4h` (5) is
`gate_proj` and `mlp_gate` (7) is `up_proj`, although its documentation describes them the other way
round. The same holds for experts (13, 15). A row of experts holds all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.adapter_format import Geometry
from loraplex.adapter_format.geometry import LINEAR, Module

QKV, MLP_H_TO_4H = 0, 5
CROSS_ATTENTION = range(8, 13)
EXPERT_IDS = (13, 14, 15)
LAST_ID = 17

_NAMES = {
    0: ("self_attn.qkv_proj",),
    1: ("self_attn.q_proj",),
    2: ("self_attn.k_proj",),
    3: ("self_attn.v_proj",),
    4: ("self_attn.o_proj",),
    5: ("mlp.gate_proj", "mlp.shared_expert.gate_proj", "mlp.gate_up_proj"),
    6: ("mlp.down_proj", "mlp.shared_expert.down_proj"),
    7: ("mlp.up_proj", "mlp.shared_expert.up_proj"),
    16: ("mlp.gate", "block_sparse_moe.gate"),
    17: ("mlp.shared_expert_gate",),
}
FUSED_MLP = "gate_up_proj"
SPLIT_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_IDS = {name: number for number, names in _NAMES.items() for name in names}
_EXPERT_NAMES = {13: ("gate_proj", "w1"), 14: ("down_proj", "w2"), 15: ("up_proj", "w3")}
_EXPERT_IDS = {name: number for number, names in _EXPERT_NAMES.items() for name in names}
_LAYER = re.compile(r".+\.layers\.(\d+)\.(.+)", re.ASCII)
_EXPERT = re.compile(r"(\w+\.experts)\.(\d+)\.(\w+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class TrtllmModule:
    """How the format names a module."""

    layer: int
    number: int
    """Module id; for the fused gate and up of an expert, the id of the first half."""
    leaf: str
    """The last part of the module's name."""
    expert: int | None = None


def trtllm_module_of(name: str) -> TrtllmModule | None:
    """How the format names a module of a base; None if it cannot."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, inner = int(match[1]), match[2]
    leaf = inner.rpartition(".")[2]
    expert = _EXPERT.fullmatch(inner)
    if expert is not None:
        number = 13 if leaf == FUSED_MLP else _EXPERT_IDS.get(leaf)
        return None if number is None else TrtllmModule(layer, number, leaf, int(expert[2]))
    found = _IDS.get(inner)
    return None if found is None else TrtllmModule(layer, found, leaf)


@dataclass(frozen=True, slots=True)
class BaseLinears:
    """The linears of a base, by layer and by what follows it in the name."""

    modules: Mapping[tuple[int, str], Module]

    @classmethod
    def of(cls, geometry: Geometry) -> BaseLinears:
        """The linears of a geometry."""
        found = {}
        for module in geometry.modules:
            match = _LAYER.fullmatch(module.name)
            if match is not None and module.kind == LINEAR:
                found[int(match[1]), match[2]] = module
        return cls(found)

    def modules_of(self, number: int, layer: int) -> list[Module]:
        """The modules that a row adapts: one module, q, k and v, or all experts; empty if the base
        has none."""
        if number in _EXPERT_NAMES:
            return self._experts(number, layer)
        for name in _NAMES.get(number, ()):
            if (layer, name) in self.modules:
                return [self.modules[layer, name]]
        split = [(layer, name) for name in SPLIT_QKV]
        if number == QKV and all(key in self.modules for key in split):
            return [self.modules[key] for key in split]
        return []

    def num_experts(self, layer: int) -> int:
        """Number of experts of a layer."""
        return len(self._experts(14, layer))

    def _experts(self, number: int, layer: int) -> list[Module]:
        found = {}
        for (own_layer, inner), module in self.modules.items():
            match = _EXPERT.fullmatch(inner)
            if match and own_layer == layer and match[3] in _EXPERT_NAMES[number]:
                found[int(match[2])] = module
        return [found[index] for index in sorted(found)]
