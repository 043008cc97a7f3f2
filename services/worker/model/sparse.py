"""Builds the sparse MLPs of mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.moe import (
    Expert,
    ExpertMlps,
    ExpertWeights,
    SharedExpert,
    SparseMlp,
)
from loraplex_services.worker.model.build import (
    Builder,
    Modules,
    gated_mlp,
    inner_inputs,
    inner_outputs,
)
from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.load import TensorWindow, Weights
from loraplex_services.worker.types.sharding import Cut


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names inside a layer, where families differ."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def read_num_active(
    reader: ModelConfigReader,
    num_experts: int,
    default: int | None = None,
    key: str = "num_experts_per_tok",
) -> int:
    """How many experts compute a token, of `num_experts` in a layer.

    Raises:
        Unsupported: more than there are, which kernels do not check again.
    """
    count = reader.integer(key, default)
    if count > num_experts:
        raise reader.refuse(key, count, f"is more than the {num_experts} experts of a layer")
    return count


def sparse_mlp(builder: Builder, layer: int, names: ExpertNames) -> SparseMlp:
    """The sparse MLP of a layer. The router is a site like any linear, and each expert has two."""
    config, moe = builder.config, builder.config.moe
    assert moe is not None, config.model_type
    prefix = f"{builder.names.layer.format(layer)}.{names.block}"
    hidden = config.hidden_size
    router = builder.linear(layer, hidden, [(f"{prefix}.gate", moe.num_experts)], has_bias=False)
    experts = stacked_experts(builder, layer, f"{prefix}.experts", names)
    shared = None
    if moe.shared_intermediate_size:
        gate = [(f"{prefix}.shared_expert_gate", 1)]
        width, own = moe.shared_intermediate_size, f"{prefix}.shared_expert"
        shared = SharedExpert(
            gated_mlp(builder, layer, own, width, is_addend=builder.shard.size > 1),
            builder.linear(layer, hidden, gate, has_bias=False),
            builder.operators.gated("sigmoid"),
        )
    return routed_mlp(builder, layer, router, experts, shared)


def routed_mlp(
    builder: Builder,
    layer: int,
    router: LoraLinear,
    experts: ExpertMlps,
    shared: SharedExpert | None = None,
) -> SparseMlp:
    """A sparse MLP of components that a family has built."""
    moe, operators = builder.config.moe, builder.operators
    assert moe is not None, builder.config.model_type
    return SparseMlp(
        layer,
        router,
        experts,
        moe.num_active,
        moe.renormalise,
        shared,
        operators.ranks.all_reduce,
        operators.choose_experts,
    )


def stacked_experts(builder: Builder, layer: int, prefix: str, names: ExpertNames) -> ExpertMlps:
    """All experts of a layer. Their weights lie in one tensor for each projection, or in codes of
    their own if a kernel reads these."""
    moe, hidden = builder.config.moe, builder.config.hidden_size
    assert moe is not None, builder.config.model_type
    width = moe.intermediate_size
    gate_up = ExpertStack(builder, moe.num_experts, inner_outputs(width))
    down = ExpertStack(builder, moe.num_experts, inner_inputs(width))
    if builder.weights.has(f"{prefix}.gate_up_proj"):
        gate_up.read(f"{prefix}.gate_up_proj", 2 * width, hidden)
        down.read(f"{prefix}.down_proj", hidden, width)
    experts = []
    for number in range(moe.num_experts):
        own = f"{prefix}.{number}"
        parts = [(f"{own}.{name}", width) for name in (names.gate, names.up)]
        expert = Expert(
            gate_up.add(layer, hidden, parts),
            down.add(layer, width, [(f"{own}.{names.down}", hidden)]),
        )
        # PEFT targets the experts of transformers 5 by these names.
        builder.sites.alias(f"{own}.gate_up_proj", expert.gate_up.site_id)
        if names.down != "down_proj":
            builder.sites.alias(f"{own}.down_proj", expert.down.site_id)
        experts.append(expert)
    activation, operators = builder.config.activation, builder.operators
    weights = None
    if not (gate_up.is_coded or down.is_coded):
        weights = ExpertWeights(gate_up.weights, down.weights)
    return operators.experts(weights, moe.num_active, activation, experts)


class ExpertStack:
    """The weights of one projection of all experts, `[experts, out, in]`, filled one by one."""

    def __init__(self, builder: Builder, num_experts: int, cut: Cut) -> None:
        """`cut`: how ranks divide each expert."""
        self._builder = builder
        self._cut = cut
        self._num_experts = num_experts
        self._num_filled = 0
        self._is_read = False
        self.is_coded = False
        """Whether each expert has a weight of its own, because the files have codes that a kernel
        reads."""
        self._weights: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """The weights of all experts, once each was added."""
        assert self._weights is not None and self._num_filled == self._num_experts
        return self._weights

    def read(self, name: str, num_outputs: int, num_inputs: int) -> None:
        """Take the weights of all experts, which the files hold in one tensor."""
        shape = self._num_experts, num_outputs, num_inputs
        window = self._builder.own.window(num_outputs, self._cut, dim=1)
        self._weights, self._is_read = _taken(self._builder.weights, name, shape, window), True

    def add(self, layer: int, num_inputs: int, modules: Modules) -> LoraLinear:
        """Add the next expert. Its weight becomes a part of the stack, or stays in codes."""
        if not self._is_read and self._num_filled == 0:
            self.is_coded = self._builder.keeps_expert_codes(modules, num_inputs)
        if self.is_coded:
            self._num_filled += 1
            base = self._builder.base(modules, num_inputs, self._cut)
            return self._builder.expert_linear(layer, num_inputs, modules, base, self._cut)
        if not self._is_read:
            weight = self._builder.weight(modules, num_inputs, self._cut)
            if self._weights is None:
                self._weights = weight.new_empty(self._num_experts, *weight.shape)
            self._weights[self._num_filled].copy_(weight)
        assert self._weights is not None
        base = self._builder.operators.expert_linear(self._weights[self._num_filled])
        self._num_filled += 1
        return self._builder.expert_linear(layer, num_inputs, modules, base, self._cut)


def _taken(
    weights: Weights, name: str, shape: tuple[int, int, int], window: TensorWindow | None
) -> Tensor:
    """The weights of all experts, `[experts, out, in]`, or a window of them. Published files of
    Qwen 3 VL hold the inputs before the outputs."""
    try:
        return weights.take(name, shape, window)
    except InvalidRequest as error:
        num_experts, num_outputs, num_inputs = shape
        own = None if window is None else window.transposed()
        try:
            weight = weights.take(name, (num_experts, num_inputs, num_outputs), own)
        except InvalidRequest:
            raise error from None
        return weight.transpose(1, 2).contiguous()
