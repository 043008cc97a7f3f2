"""The text model of Gemma 4.

Values are normalised, full layers have wider heads, and some layers read the keys and values of
earlier ones. Some sizes also have per-layer inputs, and one has experts next to the MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from loraplex_services.worker.layers.embedding import TokenTable
from loraplex_services.worker.layers.gemma4 import (
    Gemma4Attention,
    Gemma4Feed,
    Gemma4Layer,
    Gemma4Router,
    LayerInput,
    PerLayerEmbedding,
    SideExperts,
)
from loraplex_services.worker.model.build import Builder, gated_mlp
from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.model.gemma2 import DEFAULTS
from loraplex_services.worker.model.plain import (
    FULL,
    SLIDING,
    read_layer_types,
    read_plain,
    windows_of,
)
from loraplex_services.worker.model.rope_config import rope_from_params
from loraplex_services.worker.model.sparse import ExpertNames, read_num_active, stacked_experts
from loraplex_services.worker.ops.norm.torch import Norm, NormWeight
from loraplex_services.worker.types.model_config import (
    KvHeads,
    ModelConfig,
    MoeConfig,
    RopeConfig,
)
from loraplex_services.worker.types.sharding import Cut, local_config

ROPES: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
"""Defaults of `rope_parameters`."""
GLOBAL_HEAD_DIM = 512
"""Default width of the heads of full layers."""
PERIOD = 6
"""By default, each sixth layer is full."""
OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
"""Keys without an effect unless `enable_moe_block` is true."""
OF_IMAGES = "vision"
"""Value of `use_bidirectional_attention` under which only the tokens of images see later ones."""
_OF_LAYER = frozenset({"head_dim", "num_key_value_heads"})


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of the text model."""
    config = _read(reader, "gemma4_text", eos_token_ids, 131072, 512)
    width = reader.count("hidden_size_per_layer_input", 256)
    for key in OF_EXPERTS:
        reader.get(key)
    num_rows = reader.count("vocab_size_per_layer_input", 262144)
    if width and num_rows < config.vocab_size:
        why = f"must be at least vocab_size, {config.vocab_size}"
        raise reader.refuse("vocab_size_per_layer_input", num_rows, why)
    return replace(
        config,
        layer_input_size=width,
        num_layer_input_rows=num_rows if width else 0,
        moe=_read_moe(reader) if reader.flag("enable_moe_block", False) else None,
    )


def read_unified_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of the text model of a unified base, which has neither per-layer
    inputs nor experts."""
    return _read(reader, "gemma4_unified_text", eos_token_ids, 262144, 1024)


def _read(
    reader: ModelConfigReader,
    model_type: str,
    eos_token_ids: tuple[int, ...],
    max_tokens: int,
    window: int,
) -> ModelConfig:
    reader.expect("use_bidirectional_attention", (None, OF_IMAGES))
    defaults = replace(DEFAULTS, max_position_embeddings=max_tokens)
    config = read_plain(reader.without("rope_parameters"), model_type, eos_token_ids, defaults)
    types = _read_types(reader, config.num_layers)
    keys_are_values = reader.flag("attention_k_eq_v", False)
    heads = _read_heads(reader, config, types, keys_are_values)
    sources = _read_sources(reader, types)
    readers = tuple(layer for layer, source in enumerate(sources) if layer != source)
    has_bias = reader.flag("attention_bias", False)
    return replace(
        config,
        windows=windows_of(types, reader.integer("sliding_window", window)),
        ropes=_read_ropes(reader, types, heads),
        attention_scale=1.0,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=True,
        norm_in_float32=True,
        embed_scale=config.hidden_size**0.5,
        logit_softcap=reader.optional_positive("final_logit_softcapping", None),
        own_kv_heads=heads,
        kv_sources=sources,
        keys_are_values=tuple(keys_are_values and name == FULL for name in types),
        wide_mlps=readers if reader.flag("use_double_wide_mlp", False) else (),
    )


def _read_types(reader: ModelConfigReader, num_layers: int) -> tuple[str, ...]:
    """The type of each layer. The last is full, whatever the file says, as in transformers."""
    default = [SLIDING if (layer + 1) % PERIOD else FULL for layer in range(num_layers)]
    return (*read_layer_types(reader, num_layers, default)[:-1], FULL)


def _read_heads(
    reader: ModelConfigReader, config: ModelConfig, types: tuple[str, ...], keys_are_values: bool
) -> tuple[KvHeads, ...]:
    """The key heads of each layer. Published files have those of full layers, and files of
    transformers 5.23 those of each layer that differs."""
    count = reader.get("num_global_key_value_heads")
    of_full = {"head_dim": reader.integer("global_head_dim", GLOBAL_HEAD_DIM)}
    if keys_are_values and count is not None:
        of_full["num_key_value_heads"] = count
    default = {str(layer): of_full for layer, name in enumerate(types) if name == FULL}
    changes = reader.get("per_layer_config", default)
    if not isinstance(changes, dict) or not all(key.isdecimal() for key in changes):
        raise reader.refuse("per_layer_config", changes, "must be an object with layers as keys")
    by_layer = {int(key): own for key, own in changes.items()}  # written as "04" where there are 10
    found = []
    for layer in range(config.num_layers):
        own = by_layer.get(layer, {})
        if not isinstance(own, dict) or not _OF_LAYER >= set(own):
            known = ", ".join(sorted(_OF_LAYER))
            raise reader.refuse(f"per_layer_config.{layer}", own, f"may hold {known} only")
        heads = KvHeads(
            own.get("num_key_value_heads", config.num_kv_heads),
            own.get("head_dim", config.head_dim),
        )
        is_divisor = type(heads.count) is int and heads.count > 0
        if not is_divisor or config.num_heads % heads.count:
            why = f"layer {layer}: must divide num_attention_heads, {config.num_heads}"
            raise reader.refuse("num_global_key_value_heads", heads.count, why)
        if type(heads.dim) is not int or heads.dim < 2 or heads.dim % 2:
            raise reader.refuse("global_head_dim", heads.dim, f"layer {layer}: must be even")
        found.append(heads)
    return tuple(found)


def _read_sources(reader: ModelConfigReader, types: tuple[str, ...]) -> tuple[int, ...]:
    """The layer whose keys and values each layer reads. The last `num_kv_shared_layers` read
    those of the last layer before them of the same type."""
    num_own = len(types) - reader.count("num_kv_shared_layers", 0)
    last = {name: layer for layer, name in enumerate(types[: max(num_own, 0)])}
    if set(last) != set(types):
        why = "must leave a layer of each type that has keys of its own"
        raise reader.refuse("num_kv_shared_layers", len(types) - num_own, why)
    return tuple(layer if layer < num_own else last[name] for layer, name in enumerate(types))


def _read_ropes(
    reader: ModelConfigReader, types: tuple[str, ...], heads: tuple[KvHeads, ...]
) -> tuple[RopeConfig, ...]:
    params = reader.get("rope_parameters", ROPES)
    if not isinstance(params, dict) or not isinstance(params.get(FULL), dict):
        raise reader.refuse("rope_parameters", params, f"must have {FULL} and {SLIDING}")
    if SLIDING in types and not isinstance(params.get(SLIDING), dict):
        raise reader.refuse("rope_parameters", params, f"must have {FULL} and {SLIDING}")
    found = []
    for name, own in zip(types, heads, strict=True):
        used = params[name]
        if used.get("rope_type", "default") == "default":  # transformers rotates whole heads then
            used = {key: value for key, value in used.items() if key != "partial_rotary_factor"}
        theta = ROPES[name]["rope_theta"]
        found.append(rope_from_params(reader, used, own.dim, theta))
    return tuple(found)


def _read_moe(reader: ModelConfigReader) -> MoeConfig:
    num_experts = reader.integer("num_experts")
    return MoeConfig(
        num_experts=num_experts,
        num_active=read_num_active(reader, num_experts, key="top_k_experts"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        renormalise=True,
    )


def assemble(builder: Builder) -> Decoder:
    """The model with its weights."""
    return builder.build(make_layer=_layer, layer_inputs=_inputs(builder))


def _inputs(builder: Builder) -> PerLayerEmbedding | None:
    config = builder.config
    if not config.layer_input_size:
        return None
    width, dtype = config.num_layers * config.layer_input_size, builder.weights.dtype
    rows = config.num_layer_input_rows
    name = "model.per_layer_model_projection"
    table = builder.own.token_rows("model.embed_tokens_per_layer.weight", rows, width)
    return PerLayerEmbedding(
        TokenTable(table, rows, builder.operators.ranks, dtype),
        builder.linear(-1, config.hidden_size, [(name, width)], has_bias=False),
        builder.norm(-1, "model.per_layer_projection_norm", config.layer_input_size),
        config.layer_input_size,
    )


def _layer(builder: Builder, layer: int) -> Gemma4Layer:
    config, prefix = builder.config, f"model.layers.{layer}"
    scalar = builder.weights.take(f"{prefix}.layer_scalar", (1,))
    return Gemma4Layer(
        layer,
        _attention(builder, layer),
        _feed(builder, layer),
        _norms(builder, layer, "input_layernorm", "post_attention_layernorm"),
        _norms(builder, layer, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        _input(builder, layer) if config.layer_input_size else None,
        scalar,
    )


def _norms(builder: Builder, layer: int, before: str, after: str) -> tuple[Norm, Norm]:
    prefix, width = f"model.layers.{layer}", builder.config.hidden_size
    return (
        builder.norm(layer, f"{prefix}.{before}", width),
        builder.norm(layer, f"{prefix}.{after}", width),
    )


def _plain_norm(builder: Builder, width: int) -> Norm:
    """A norm without a weight, which no adapter can name."""
    weight = torch.ones(width, dtype=builder.weights.dtype, device=builder.device)
    eps = builder.config.norm_eps
    return builder.operators.norm(-1, NormWeight(weight, eps, 0.0, in_float32=True))


def _attention(builder: Builder, layer: int) -> Gemma4Attention:
    config, prefix = builder.config, f"model.layers.{layer}.self_attn"
    heads, source = config.kv_heads[layer], config.kv_sources[layer]
    q_size, kv_size = config.num_heads * heads.dim, heads.count * heads.dim
    names = [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
    if config.keys_are_values[layer]:
        del names[2]
    unused = []
    if source != layer:
        unused, names = names[1:], names[:1]
    modules = [(f"{prefix}.{name}", width) for name, width in names]
    segments = (q_size, config.num_heads), (kv_size, heads.count), (kv_size, heads.count)
    own = local_config(config, builder.shard)
    out = [(f"{prefix}.o_proj", config.hidden_size)]
    attention = Gemma4Attention(
        source if config.kv_sources.count(source) > 1 else None,
        builder.linear(
            layer,
            config.hidden_size,
            modules,
            config.qkv_bias,
            Cut(outputs=segments[: len(modules)]),
        ),
        builder.linear(layer, q_size, out, config.o_bias, Cut(inputs=segments[:1])),
        builder.operators.attention_maker.layer(own, source, rotated=True),
        (
            builder.norm(layer, f"{prefix}.q_norm", heads.dim),
            builder.norm(layer, f"{prefix}.k_norm", heads.dim) if source == layer else None,
            _plain_norm(builder, heads.dim),
        ),
        builder.operators.rotate,
    )
    _take_unused(builder, layer, prefix, unused, heads.dim if unused else 0)
    return attention


def _take_unused(
    builder: Builder, layer: int, prefix: str, linears: list[tuple[str, int]], head_dim: int
) -> None:
    """Take the weights that published files hold for layers that read the keys of others. They
    become sites, because adapters may name these modules, without an effect, as in transformers."""
    config = builder.config
    for name, width in linears:
        if builder.weights.has(f"{prefix}.{name}.weight"):
            modules = [(f"{prefix}.{name}", width)]
            builder.linear(layer, config.hidden_size, modules, config.qkv_bias)
    if head_dim and builder.weights.has(f"{prefix}.k_norm.weight"):
        builder.norm(layer, f"{prefix}.k_norm", head_dim)


def _feed(builder: Builder, layer: int) -> Gemma4Feed:
    config, prefix = builder.config, f"model.layers.{layer}"
    width = config.intermediate_size * (2 if layer in config.wide_mlps else 1)
    mlp = gated_mlp(builder, layer, f"{prefix}.mlp", width)
    if config.moe is None:
        return Gemma4Feed(mlp, None)
    hidden, num_experts = config.hidden_size, config.moe.num_experts
    router = Gemma4Router(
        _plain_norm(builder, hidden),
        builder.weights.take(f"{prefix}.router.scale", (hidden,)),
        builder.linear(layer, hidden, [(f"{prefix}.router.proj", num_experts)], has_bias=False),
        builder.weights.take(
            f"{prefix}.router.per_expert_scale", (num_experts,), dtype=torch.float32
        ),
        config.moe.num_active,
        builder.operators.choose_experts,
    )
    post = builder.norm(layer, f"{prefix}.post_feedforward_layernorm_1", hidden)
    own = _norms(builder, layer, "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    experts = stacked_experts(builder, layer, f"{prefix}.experts", ExpertNames())
    sum_ranks = builder.operators.ranks.all_reduce
    return Gemma4Feed(mlp, SideExperts(layer, router, experts, post, own, sum_ranks))


def _input(builder: Builder, layer: int) -> LayerInput:
    config, prefix = builder.config, f"model.layers.{layer}"
    hidden, width = config.hidden_size, config.layer_input_size
    gate = [(f"{prefix}.per_layer_input_gate", width)]
    projection = [(f"{prefix}.per_layer_projection", hidden)]
    return LayerInput(
        builder.linear(layer, hidden, gate, has_bias=False),
        builder.linear(layer, width, projection, has_bias=False),
        builder.norm(layer, f"{prefix}.post_per_layer_input_norm", hidden),
        builder.operators.gated(config.activation),
    )
