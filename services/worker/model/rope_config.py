"""Rotary settings of config.json in their old and new spellings."""

from __future__ import annotations

import math
from typing import Any

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.types.model_config import RopeConfig

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
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    # Its factor only matters beyond max_position_embeddings, which is never served.
    "dynamic": ("factor",),
    "proportional": (),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
    "dynamic": ("original_max_position_embeddings",),
    "proportional": ("factor",),
}
_OLD_NAMES = {"mrope": "default", "su": "longrope"}
"""`mrope` has three positions for each token, which are equal without images."""
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
_NO_NUMBERS = frozenset({"short_factor", "long_factor", "truncate"})
_FALSY_IF_ZERO = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
"""Keys of YaRN whose 0 means that they are absent, as in transformers."""
_DIVIDES_BY_LOG = {"yarn": "rope_theta", "longrope": _ORIGINAL}
_SPELLINGS = frozenset({"type", "rope_type", "rope_theta", _PARTIAL})


def read_rope(
    reader: ModelConfigReader,
    head_dim: int,
    default_theta: float = 10000.0,
    default_original: int | None = None,
    *,
    rotates_part: bool = True,
) -> RopeConfig:
    """The one rotary embedding of a model whose layers share it.

    Args:
        default_original: what an absent `original_max_position_embeddings` of the config means, in
            families that have the key.
        rotates_part: whether the family reads `partial_rotary_factor`. In others, the library
            ignores it without a scaling method, and fails with one.
    """
    theta = reader.number("rope_theta", default_theta)
    partial = reader.number(_PARTIAL, 1.0)
    params = rope_parameters(reader, {})
    if not isinstance(params, dict):
        raise reader.refuse("rope_parameters", params, "must be an object")
    if not rotates_part:
        part = _positive(reader, _PARTIAL, params.get(_PARTIAL, partial))
        if kind_of(params) != "default" and part != 1.0:
            why = "is not served: this family rotates whole heads"
            raise reader.refuse(f"rope_parameters.{_PARTIAL}", part, why)
        params, partial = {k: v for k, v in params.items() if k != _PARTIAL}, 1.0
    if kind_of(params) in _WITH_ORIGINAL:
        params = with_original(reader, params, default_original)
    return rope_from_params(reader, params, head_dim, theta, partial)


def rope_parameters(reader: ModelConfigReader, default: Any) -> Any:
    """The rotary embedding that a config describes.

    New files hold `rope_parameters`, older ones `rope_theta` and `rope_scaling`. Some new files
    have the latter as well. It then takes precedence, as in transformers.
    """
    newer = reader.get("rope_parameters", default)
    return reader.get("rope_scaling") or newer


def kind_of(params: dict[str, Any]) -> str:
    """The scaling method, by its newest name."""
    kind = params.get("rope_type", params.get("type", "default"))
    return _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else str(kind)


def with_original(
    reader: ModelConfigReader, params: dict[str, Any], default_original: int | None = None
) -> dict[str, Any]:
    """The parameters with the context that the base was trained for.

    The config's key takes precedence over the rope's, as in transformers; without either, it is the
    base's context, `max_position_embeddings`, which the reader must have: the family's default if
    the file leaves it out.
    """
    context = reader.integer("max_position_embeddings")
    lengths = reader.get(_ORIGINAL, default_original), params.get(_ORIGINAL), context
    original = next(length for length in lengths if length is not None)
    if type(original) is not int or original <= 0:
        raise reader.refuse(_ORIGINAL, original, "must be a positive integer")
    found = {**params, _ORIGINAL: original}
    if kind_of(params) == "longrope" and found.get("factor") is None:
        found["factor"] = context / original
    return found


def rope_from_params(
    reader: ModelConfigReader,
    params: dict[str, Any],
    head_dim: int,
    theta: float,
    partial: float = 1.0,
) -> RopeConfig:
    """One rotary embedding from its dictionary; `theta` and `partial` are its fallbacks."""
    kind = kind_of(params)
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
    params = {k: v for k, v in params.items() if not (v == 0 and k in _FALSY_IF_ZERO)}
    kept = {k: v for k, v in params.items() if k not in _SPELLINGS and v is not None}
    if kind != "default":
        for key, value in kept.items():
            if key not in _NO_NUMBERS:
                _positive(reader, key, value)
    theta = _positive(reader, "rope_theta", params.get("rope_theta", theta))
    divided = _DIVIDES_BY_LOG.get(kind, "")
    if {**kept, "rope_theta": theta}.get(divided) == 1:
        why = f"must not be 1: {kind} divides by its logarithm"
        raise reader.refuse(f"rope_parameters.{divided}", 1, why)
    part = _positive(reader, _PARTIAL, params.get(_PARTIAL, partial))
    dim = int(head_dim * part)
    if kind == "proportional":  # rotates the first pairs of a whole head
        dim, kept["num_pairs"] = head_dim, int(part * head_dim // 2)
    if kind == "yarn" and dim % 2:  # in transformers, too
        why = f"needs an even number of rotated components in a head, not {dim}"
        raise reader.refuse("rope_parameters.rope_type", kind, why)
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            kept[key] = _factors(reader, key, kept[key], dim // 2)
    return RopeConfig(
        dim=dim,
        theta=theta,
        kind=kind,
        params=tuple(sorted(kept.items())) if kind != "default" else (),
    )


def _positive(reader: ModelConfigReader, key: str, value: Any) -> float:
    if type(value) in (int, float) and math.isfinite(value) and value > 0:
        return float(value)
    raise reader.refuse(f"rope_parameters.{key}", value, "must be a number above 0")


def _factors(reader: ModelConfigReader, key: str, value: Any, count: int) -> tuple[float, ...]:
    is_list = isinstance(value, list) and len(value) == count
    if not is_list or not all(type(v) in (int, float) and math.isfinite(v) and v for v in value):
        description = f"must be a list of {count} numbers, one for each pair that rotates"
        raise reader.refuse(f"rope_parameters.{key}", value, description)
    return tuple(map(float, value))
