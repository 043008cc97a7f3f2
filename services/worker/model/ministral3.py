"""Ministral 3: Mistral without a window, with YaRN, and queries that are scaled by position."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.plain import Defaults, read_plain
from loraplex_services.worker.model.rope_config import rope_parameters
from loraplex_services.worker.types.model_config import ModelConfig, QueryScale

DEFAULTS = Defaults(head_dim=128, num_kv_heads=8, norm_eps=1e-5, max_position_embeddings=262144)
BETA, CONTEXT_LEN = "llama_4_scaling_beta", "original_max_position_embeddings"
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    CONTEXT_LEN: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""That of a config without one."""
REPEATED = "max_position_embeddings"
"""A key of the config that is repeated among the rotary parameters."""


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json."""
    params = rope_parameters(reader, DEFAULT_ROPE)
    if not isinstance(params, dict):
        raise reader.refuse("rope_parameters", params, "must be an object")
    rope = {key: value for key, value in params.items() if key not in (BETA, REPEATED)}
    own = reader.without("rope_scaling").replaced("rope_parameters", rope)
    config = read_plain(own, "ministral3", eos_token_ids, DEFAULTS)
    window = reader.optional_integer("sliding_window")
    return replace(
        config,
        windows=(window,) * config.num_layers,
        query_scale=_query_scale(reader, params),
    )


def _query_scale(reader: ModelConfigReader, params: dict[str, object]) -> QueryScale | None:
    beta, context_len = params.get(BETA), params.get(CONTEXT_LEN)
    if beta is None:
        return None
    if not isinstance(beta, int | float):
        raise reader.refuse(f"rope_parameters.{BETA}", beta, "must be a number")
    if not isinstance(context_len, int) or context_len < 1:
        raise reader.refuse(f"rope_parameters.{CONTEXT_LEN}", context_len, "must be an integer")
    return QueryScale(float(beta), context_len)
