"""gpt-oss: attention sinks, a window on every other layer, experts with biases and clamped gates.

Published weights of the experts are in MXFP4, and are widened when the base is loaded. Other
formats hold the linears of attention only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.layers.moe import (
    Expert,
    ExpertMlps,
    ExpertWeights,
    SparseMlp,
)
from loraplex_services.worker.model.build import Builder, inner_inputs
from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.model.mxfp4 import take_mxfp4
from loraplex_services.worker.model.plain import (
    FULL,
    SLIDING,
    Defaults,
    read_layer_types,
    read_plain,
    windows_of,
)
from loraplex_services.worker.model.rope_config import rope_parameters
from loraplex_services.worker.model.sparse import read_num_active, routed_mlp
from loraplex_services.worker.types.model_config import ClampedSwiglu, ModelConfig, MoeConfig
from loraplex_services.worker.types.sharding import Cut

DEFAULTS = Defaults(
    head_dim=64,
    num_kv_heads=8,
    norm_eps=1e-5,
    max_position_embeddings=131072,
    rope_theta=150_000.0,
)
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Used if the config lacks the field."""
REPEATED = ("initial_context_length", "experts_per_token")
"""Keys that repeat another key of published files."""


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json."""
    for key in REPEATED:
        reader.get(key)
    reader.expect("hidden_act", ("silu",), "silu")  # of the gate, which is clamped
    rope = rope_parameters(reader, ROPE)
    own = reader.without("rope_scaling").replaced("rope_parameters", rope)
    config = read_plain(own, "gpt_oss", eos_token_ids, DEFAULTS)
    default = [FULL if layer % 2 else SLIDING for layer in range(config.num_layers)]
    types = read_layer_types(reader, config.num_layers, default)
    has_bias = reader.flag("attention_bias", True)
    num_experts = reader.integer("num_local_experts", 128)
    return replace(
        config,
        windows=windows_of(types, reader.integer("sliding_window", 128)),
        qkv_bias=has_bias,
        o_bias=has_bias,
        norm_in_float32=True,
        attention_sinks=True,
        moe=MoeConfig(
            num_experts=num_experts,
            num_active=read_num_active(reader, num_experts, 4),
            intermediate_size=config.intermediate_size,
            renormalise=True,
            swiglu=ClampedSwiglu(
                reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0)
            ),
        ),
    )


def assemble(builder: Builder) -> Decoder:
    """The model with its weights."""
    return builder.build(_mlp)


def _mlp(builder: Builder, layer: int) -> SparseMlp:
    config, moe = builder.config, builder.config.moe
    assert moe is not None, config.model_type
    prefix = f"model.layers.{layer}.mlp"
    modules = [(f"{prefix}.router", moe.num_experts)]
    router = builder.linear(layer, config.hidden_size, modules, has_bias=True)
    return routed_mlp(builder, layer, router, _experts(builder, layer, f"{prefix}.experts", moe))


def _experts(builder: Builder, layer: int, prefix: str, moe: MoeConfig) -> ExpertMlps:
    """Two sites for each expert. Gate and up are interleaved in one projection."""
    num, hidden, width = moe.num_experts, builder.config.hidden_size, moe.intermediate_size
    by_neurons, by_inputs = Cut(outputs=((2 * width, width),)), inner_inputs(width)
    stacks = (
        _stacked(builder, f"{prefix}.gate_up_proj", (num, 2 * width, hidden), by_neurons),
        _stacked(builder, f"{prefix}.down_proj", (num, hidden, width), by_inputs),
    )
    gate_up_bias = builder.weights.take(f"{prefix}.gate_up_proj_bias", (num, 2 * width))
    down_bias = builder.weights.take(f"{prefix}.down_proj_bias", (num, hidden))
    weights = ExpertWeights(
        *stacks, builder.own.bias(gate_up_bias, by_neurons), builder.own.bias(down_bias, by_inputs)
    )
    experts, product = [], builder.operators.expert_linear
    for i in range(num):
        gate_up = [(f"{prefix}.{i}.gate_up_proj", 2 * width)]
        down = [(f"{prefix}.{i}.down_proj", hidden)]
        experts.append(
            Expert(
                builder.expert_linear(
                    layer,
                    hidden,
                    gate_up,
                    product(weights.gate_up[i]),
                    by_neurons,
                    gate_up_bias[i],
                ),
                builder.expert_linear(
                    layer, width, down, product(weights.down[i]), by_inputs, down_bias[i]
                ),
            )
        )
    assert moe.swiglu is not None, "read_config sets it"
    return builder.operators.experts(weights, moe.num_active, moe.swiglu, experts)


def _stacked(builder: Builder, name: str, shape: tuple[int, int, int], cut: Cut) -> Tensor:
    """All experts' weights of one projection, `[experts, out, in]`, or what this rank has.

    Raises Unsupported for files that tools wrote which make a linear of each expert.
    """
    num_experts, num_outputs, num_inputs = shape
    window = builder.own.window(num_outputs, cut, dim=1)
    if builder.weights.has(f"{name}_blocks"):
        return take_mxfp4(builder.weights, name, shape, window)
    stored = num_experts, num_inputs, num_outputs
    own = None if window is None else window.transposed()
    try:
        weight = builder.weights.take(name, stored, own)
    except InvalidRequest as error:
        if builder.weights.has(name):
            raise
        why = (
            "must hold all experts of a layer, plain or in MXFP4; serve a copy in which the "
            "experts were not quantised"
        )
        raise Unsupported.field(name, "missing", why) from error
    return weight.transpose(1, 2).contiguous()
