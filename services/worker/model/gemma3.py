"""Gemma 3, text: windowed and full layers with different rotary embeddings, and head norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.gemma2 import DEFAULTS, read_gemma
from loraplex_services.worker.model.plain import FULL, SLIDING, read_layer_types, windows_of
from loraplex_services.worker.model.rope_config import (
    kind_of,
    rope_from_params,
    with_original,
)
from loraplex_services.worker.types.model_config import ModelConfig, RopeConfig

GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0
CONTEXT_LEN = 131072
"""The library's default, which saved text configs of Gemma 3 often leave out."""


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of the text model."""
    context = reader.get("max_position_embeddings", CONTEXT_LEN)
    reader = reader.replaced("max_position_embeddings", context)
    defaults = replace(DEFAULTS, max_position_embeddings=CONTEXT_LEN)
    config = read_gemma(reader.without("rope_parameters"), "gemma3_text", eos_token_ids, defaults)
    ropes = _read_ropes(reader, config.head_dim)
    period = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 6))
    default = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(config.num_layers)]
    types = read_layer_types(reader, config.num_layers, default)
    return replace(
        config,
        qk_norm=True,
        windows=windows_of(types, reader.integer("sliding_window", 4096)),
        ropes=tuple(replace(ropes[name], dim=config.head_dim) for name in types),
        logit_softcap=reader.optional_positive("final_logit_softcapping", None),
    )


def _read_ropes(reader: ModelConfigReader, head_dim: int) -> dict[str, RopeConfig]:
    """Rotary embedding per layer type; `rope_scaling` changes that of the full layers only."""
    theta = reader.number("rope_theta", GLOBAL_THETA)
    local_theta = reader.number("rope_local_base_freq", LOCAL_THETA)
    scaling = reader.get("rope_scaling", {})
    params = reader.get("rope_parameters", {FULL: {}, SLIDING: {}})
    if not isinstance(params, dict) or not {FULL, SLIDING} <= set(params):
        raise reader.refuse("rope_parameters", params, f"must have {FULL} and {SLIDING}")
    ropes = {
        FULL: _read_rope(reader, {**(params[FULL] or {}), **scaling}, head_dim, theta),
        SLIDING: _read_rope(reader, params[SLIDING] or {}, head_dim, local_theta),
    }
    lengths = {rope.switch_len for rope in ropes.values()} - {None}
    if len(lengths) > 1:
        why = f"must have one original_max_position_embeddings for {FULL} and {SLIDING}"
        raise reader.refuse("rope_parameters", sorted(map(str, lengths)), why)
    return ropes


def _read_rope(
    reader: ModelConfigReader, params: dict[str, Any], head_dim: int, theta: float
) -> RopeConfig:
    """One rotary embedding, without YaRN's `truncate`, which transformers does not read here."""
    used = {key: value for key, value in params.items() if key != "truncate"}
    if kind_of(used) == "longrope":
        used = with_original(reader, used)
    return rope_from_params(reader, used, head_dim, theta)
