"""Qwen 3.5 and 3.6, text: gated delta nets, and gated attention in every fourth layer.

Dense, or with a mixture of experts in every layer. Qwen 3 Next is the same with other names.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loraplex_services.worker.layers.gated_delta_net import GatedDeltaNet, Split
from loraplex_services.worker.model.build import Builder, Modules, dense_mlp
from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.decoder import Decoder, Mixer, Mlp
from loraplex_services.worker.model.plain import FULL, Defaults, read_layer_types, read_plain
from loraplex_services.worker.model.qwen_moe import read_moe
from loraplex_services.worker.model.rope_config import rope_parameters
from loraplex_services.worker.model.sparse import ExpertNames, sparse_mlp
from loraplex_services.worker.ops.recurrence.backend import DeltaWeights
from loraplex_services.worker.types.model_config import ModelConfig, RecurrenceConfig
from loraplex_services.worker.types.sharding import Cut, Segments, local_recurrence

RECURRENT = "linear_attention"
DEFAULTS = Defaults(head_dim=256, num_kv_heads=4, max_position_embeddings=32768, rotates_part=True)
OF_SPARSE = replace(DEFAULTS, num_kv_heads=2)
PARTIAL_ROTARY = 0.25
OF_OTHER_PARTS = (
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "mamba_ssm_dtype",
)
"""Keys of published files about layers that predict further tokens, of which their tensors tell
more (see `draft_head`), and about the dtype of states, which are float32 here."""
OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys of rotary embeddings for images: without images, the three positions of a token are
equal."""


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of the dense text model."""
    return _read(reader, "qwen3_5_text", eos_token_ids, DEFAULTS)


def read_moe_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of the text model with experts."""
    width = reader.integer("moe_intermediate_size", 512)
    own = reader.replaced("intermediate_size", width).replaced("moe_intermediate_size", width)
    own = own.replaced("norm_topk_prob", True)
    config = _read(own, "qwen3_5_moe_text", eos_token_ids, OF_SPARSE)
    return replace(config, moe=read_moe(own, config, 8, 256, shared_size=512))


def read_next_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of Qwen 3 Next."""
    own = reader.replaced("norm_topk_prob", reader.flag("norm_topk_prob", True))
    config = _read(own, "qwen3_next", eos_token_ids, OF_SPARSE)
    return replace(config, moe=read_moe(own, config, 10, 512, shared_size=512))


def _read(
    reader: ModelConfigReader, model_type: str, eos_token_ids: tuple[int, ...], defaults: Defaults
) -> ModelConfig:
    for key in OF_OTHER_PARTS:
        reader.get(key)
    reader.expect("attn_output_gate", (True,), True)
    reader.expect("hidden_act", ("silu", "swish"), "silu")  # of the recurrent layers, too
    config = read_plain(_of_text(reader), model_type, eos_token_ids, defaults)
    has_bias = reader.flag("attention_bias", False)
    return replace(
        config,
        qk_norm=True,
        qkv_bias=has_bias,
        o_bias=has_bias,
        norm_offset=1.0,
        norm_in_float32=True,
        gated_attention=True,
        recurrence=_read_recurrence(reader, config.num_layers),
    )


def _of_text(reader: ModelConfigReader) -> ModelConfigReader:
    """A reader whose rotary embedding is that of texts."""
    params = rope_parameters(reader, {})
    if not isinstance(params, dict):
        raise reader.refuse("rope_parameters", params, "must be an object")
    kept = {key: value for key, value in params.items() if key not in OF_IMAGES}
    part = reader.number("partial_rotary_factor", PARTIAL_ROTARY)
    own = reader.without("rope_scaling").replaced("rope_parameters", kept)
    return own.replaced("partial_rotary_factor", part)


def _read_recurrence(reader: ModelConfigReader, num_layers: int) -> RecurrenceConfig:
    period = reader.integer("full_attention_interval", 4)
    default = [RECURRENT if (layer + 1) % period else FULL for layer in range(num_layers)]
    types = read_layer_types(reader, num_layers, default, RECURRENT)
    if FULL not in types or RECURRENT not in types:
        raise reader.refuse("layer_types", types[0], f"must have {FULL} and {RECURRENT}")
    num_key_heads = reader.integer("linear_num_key_heads", 16)
    num_value_heads = reader.integer("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        why = f"must be a multiple of linear_num_key_heads, {num_key_heads}"
        raise reader.refuse("linear_num_value_heads", num_value_heads, why)
    return RecurrenceConfig(
        layers=tuple(layer for layer, name in enumerate(types) if name == RECURRENT),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=reader.integer("linear_key_head_dim", 128),
        value_dim=reader.integer("linear_value_head_dim", 128),
        kernel_size=reader.integer("linear_conv_kernel_dim", 4),
    )


def assemble(builder: Builder) -> Decoder:
    """The model with its weights."""
    return builder.build(_mlp, _mixer)


def _mlp(builder: Builder, layer: int) -> Mlp:
    moe = builder.config.moe
    if moe is None or layer in moe.dense_layers:
        return dense_mlp(builder, layer)
    return sparse_mlp(builder, layer, ExpertNames())


def _mixer(builder: Builder, layer: int) -> Mixer:
    config = builder.config.recurrence
    assert config is not None, "read_config sets it"
    if layer not in config.layers:
        return builder.attention(layer)
    prefix, hidden = f"model.layers.{layer}.linear_attn", builder.config.hidden_size
    own = local_recurrence(config, builder.shard)
    is_next = builder.config.model_type == "qwen3_next"
    modules, cut = _next_projections(config) if is_next else _projections(config)
    named = [(f"{prefix}.{name}", width) for name, width in modules]
    values = (config.values_size, config.num_value_heads)
    out = [(f"{prefix}.out_proj", hidden)]
    return GatedDeltaNet(
        builder.linear(layer, hidden, named, has_bias=False, cut=cut),
        builder.linear(layer, config.values_size, out, has_bias=False, cut=Cut(inputs=(values,))),
        builder.operators.delta_net(
            own, config.layers.index(layer), _delta_weights(builder, config, prefix)
        ),
        builder.norm(layer, f"{prefix}.norm", config.value_dim, is_plain=True),
        _split_next(own) if is_next else _split(own),
        config.value_dim,
        builder.operators.gated("silu"),
    )


def _delta_weights(builder: Builder, config: RecurrenceConfig, prefix: str) -> DeltaWeights:
    heads = (config.num_value_heads, config.num_value_heads)

    def take(name: str, segments: Segments, *others: int) -> Tensor:
        """The part of the rank, float32."""
        size = sum(features for features, _ in segments)
        window = builder.own.window(size, Cut(outputs=segments))
        shape = (size, *others)
        return builder.weights.take(f"{prefix}.{name}", shape, window, dtype=torch.float32)

    return DeltaWeights(
        take("conv1d.weight", _channels(config), 1, config.kernel_size)[:, 0].contiguous(),
        -take("A_log", (heads,)).exp(),
        take("dt_bias", (heads,)),
    )


def _channels(config: RecurrenceConfig) -> Segments:
    """The channels of the convolution: q, k and v, each by head."""
    keys = (config.keys_size, config.num_key_heads)
    return keys, keys, (config.values_size, config.num_value_heads)


def _projections(config: RecurrenceConfig) -> tuple[Modules, Cut]:
    num_heads = config.num_value_heads
    sizes = (config.conv_size, config.values_size, num_heads, num_heads)
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    others = tuple((size, num_heads) for size in sizes[1:])
    return tuple(zip(names, sizes, strict=True)), Cut(outputs=(*_channels(config), *others))


def _split(config: RecurrenceConfig) -> Split:
    """A function from the outputs of `_projections` to (qkv, gates, b, a)."""
    num_heads = config.num_value_heads
    sizes = (config.conv_size, config.values_size, num_heads, num_heads)

    def split(y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv, gates, b, a = y.split(sizes, dim=-1)
        return qkv, gates, b, a

    return split


def _next_projections(config: RecurrenceConfig) -> tuple[Modules, Cut]:
    """The projections of Qwen 3 Next, in which the outputs of each key head are adjacent."""
    widths = _next_widths(config)
    names = ("in_proj_qkvz", "in_proj_ba")
    segments = tuple((width, config.num_key_heads) for width in widths)
    return tuple(zip(names, widths, strict=True)), Cut(outputs=segments)


def _next_widths(config: RecurrenceConfig) -> tuple[int, int]:
    return 2 * (config.keys_size + config.values_size), 2 * config.num_value_heads


def _split_next(config: RecurrenceConfig) -> Split:
    """A function from the outputs of `_next_projections` to (qkv, gates, b, a)."""
    num_heads, shared = config.num_key_heads, config.num_value_heads // config.num_key_heads
    keys, values = config.key_dim, shared * config.value_dim
    widths = _next_widths(config)

    def split(y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first, second = y.split(widths, dim=-1)
        q, k, v, gates = first.unflatten(-1, (num_heads, -1)).split(
            (keys, keys, values, values), dim=-1
        )
        b, a = second.unflatten(-1, (num_heads, -1)).split((shared, shared), dim=-1)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
        # With one value head for each key head, `flatten` leaves every second column.
        b, a = (x.flatten(1).contiguous() for x in (b, a))
        return qkv, gates.flatten(1), b, a

    return split
