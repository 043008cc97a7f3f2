"""Rotary settings of config.json in their old and new spellings."""

from __future__ import annotations

from typing import Any

from services.worker.model.config import ConfigReader, RopeConfig

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_SPELLINGS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


def read_rope(reader: ConfigReader, head_dim: int, default_theta: float = 10000.0) -> RopeConfig:
    """The one rotary embedding of a model whose layers share it.

    New files hold `rope_parameters`, older ones `rope_theta` and `rope_scaling`.
    """
    theta = reader.number("rope_theta", default_theta)
    partial = reader.number("partial_rotary_factor", 1.0)
    scaling = reader.get("rope_scaling", {})
    params = reader.get("rope_parameters", scaling)
    return rope_from_params(reader, params, head_dim, theta, partial)


def rope_from_params(
    reader: ConfigReader,
    params: dict[str, Any],
    head_dim: int,
    theta: float,
    partial: float = 1.0,
) -> RopeConfig:
    """One rotary embedding from its dictionary; `theta` and `partial` are its fallbacks."""
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in _REQUIRED:
        known = ", ".join(sorted(_REQUIRED))
        raise reader.refuse("rope_parameters.rope_type", kind, f"is not served; known: {known}")
    known_keys = {*_REQUIRED[kind], *_OPTIONAL.get(kind, ()), *_SPELLINGS}
    for key in sorted(params):
        if key not in known_keys and params[key] is not None and kind != "default":
            raise reader.refuse(f"rope_parameters.{key}", params[key], f"is not part of {kind}")
    for key in _REQUIRED[kind]:
        if params.get(key) is None:
            raise reader.refuse(f"rope_parameters.{key}", None, f"is required by {kind}")
    kept = {k: v for k, v in params.items() if k not in _SPELLINGS and v is not None}
    return RopeConfig(
        dim=int(head_dim * params.get("partial_rotary_factor", partial)),
        theta=float(params.get("rope_theta", theta)),
        kind=kind,
        params=tuple(sorted(kept.items())) if kind != "default" else (),
    )
