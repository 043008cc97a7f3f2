"""Gemma 2: soft caps, norms before and after each block, every other layer with a window."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model.build import LayerNames
from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.plain import (
    FULL,
    SLIDING,
    Defaults,
    read_layer_types,
    read_plain,
    windows_of,
)
from loraplex_services.worker.types.model_config import ModelConfig

DEFAULTS = Defaults(
    head_dim=256,
    num_kv_heads=4,
    tied_embeddings=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    max_position_embeddings=8192,
)
NAMES = LayerNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json."""
    config = read_gemma(reader, "gemma2", eos_token_ids, DEFAULTS)
    default = [SLIDING if layer % 2 == 0 else FULL for layer in range(config.num_layers)]
    types = read_layer_types(reader, config.num_layers, default)
    return replace(
        config,
        windows=windows_of(types, reader.integer("sliding_window", 4096)),
        attention_softcap=reader.optional_positive("attn_logit_softcapping", 50.0),
        logit_softcap=reader.optional_positive("final_logit_softcapping", 30.0),
    )


def read_gemma(
    reader: ModelConfigReader, model_type: str, eos_token_ids: tuple[int, ...], defaults: Defaults
) -> ModelConfig:
    """The fields that Gemma 2 and 3 have in common."""
    reader.get("hidden_act")  # written next to hidden_activation, which is the one in use
    config = read_plain(reader, model_type, eos_token_ids, defaults)
    has_bias = reader.flag("attention_bias", False)
    return replace(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        norm_offset=1.0,
        norm_in_float32=True,
        embed_scale=config.hidden_size**0.5,
        attention_scale=reader.positive("query_pre_attn_scalar", 256) ** -0.5,
    )
