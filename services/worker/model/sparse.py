"""Builds the sparse MLPs of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.layers.moe import Expert, SharedExpert, SparseMlp
from services.worker.model.build import Builder, gated_mlp


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names inside a layer, where families differ."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def sparse_mlp(builder: Builder, layer: int, names: ExpertNames) -> SparseMlp:
    """The router, a site like any linear, and the experts, two sites each."""
    config, moe = builder.config, builder.config.moe
    assert moe is not None, config.model_type
    prefix, hidden = f"model.layers.{layer}.{names.block}", config.hidden_size
    router = builder.linear(layer, hidden, [(f"{prefix}.gate", moe.num_experts)], has_bias=False)
    experts = [
        _expert(builder, layer, f"{prefix}.experts.{number}", names)
        for number in range(moe.num_experts)
    ]
    shared = None
    if moe.shared_intermediate_size:
        gate = [(f"{prefix}.shared_expert_gate", 1)]
        shared = SharedExpert(
            gated_mlp(builder, layer, f"{prefix}.shared_expert", moe.shared_intermediate_size),
            builder.linear(layer, hidden, gate, has_bias=False),
        )
    return SparseMlp(router, experts, moe.num_active, moe.renormalise, config.activation, shared)


def _expert(builder: Builder, layer: int, prefix: str, names: ExpertNames) -> Expert:
    assert builder.config.moe is not None
    width, hidden = builder.config.moe.intermediate_size, builder.config.hidden_size
    gate_up = [(f"{prefix}.{name}", width) for name in (names.gate, names.up)]
    expert = Expert(
        builder.expert_linear(layer, hidden, gate_up),
        builder.expert_linear(layer, width, [(f"{prefix}.{names.down}", hidden)]),
    )
    # PEFT targets the experts of transformers 5 by these names.
    builder.sites.alias(f"{prefix}.gate_up_proj", expert.gate_up.site_id)
    if names.down != "down_proj":
        builder.sites.alias(f"{prefix}.down_proj", expert.down.site_id)
    return expert
