"""Gemma 3, text: windowed and full layers with different rotary embeddings, and head norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.gemma2 import DEFAULTS, read_gemma
from loraplex_services.worker.model.plain import FULL, SLIDING, read_layer_types, windows_of
from loraplex_services.worker.model.rope_config import rope_from_params
from loraplex_services.worker.types.model_config import ModelConfig, RopeConfig

GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of the text model."""
    ropes = _read_ropes(reader)
    defaults = replace(DEFAULTS, max_position_embeddings=131072)
    config = read_gemma(reader.without("rope_parameters"), "gemma3_text", eos_token_ids, defaults)
    period = int(reader.get("sliding_window_pattern", reader.get("_sliding_window_pattern", 6)))
    default = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(config.num_layers)]
    types = read_layer_types(reader, config.num_layers, default)
    return replace(
        config,
        qk_norm=True,
        windows=windows_of(types, reader.integer("sliding_window", 4096)),
        ropes=tuple(replace(ropes[name], dim=config.head_dim) for name in types),
        logit_softcap=reader.optional_number("final_logit_softcapping", None),
    )


def _read_ropes(reader: ModelConfigReader) -> dict[str, RopeConfig]:
    """Rotary embedding per layer type; `rope_scaling` changes that of the full layers only."""
    theta = reader.number("rope_theta", GLOBAL_THETA)
    local_theta = reader.number("rope_local_base_freq", LOCAL_THETA)
    scaling = reader.get("rope_scaling", {})
    params = reader.get("rope_parameters", {FULL: {}, SLIDING: {}})
    if SLIDING not in params or FULL not in params:
        raise reader.refuse("rope_parameters", params, f"must have {FULL} and {SLIDING}")
    return {
        FULL: rope_from_params(reader, _used({**(params[FULL] or {}), **scaling}), 1, theta),
        SLIDING: rope_from_params(reader, _used(params[SLIDING]), 1, local_theta),
    }


def _used(params: dict[str, Any] | None) -> dict[str, Any]:
    """The parameters without YaRN's `truncate`, which transformers does not read here."""
    return {key: value for key, value in (params or {}).items() if key != "truncate"}
