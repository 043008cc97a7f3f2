"""The rotary embeddings of a base, and those of adapters that replace them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loraplex.adapter_format.rope_scaling import FIELD, RopeScaling
from loraplex.errors import InvalidAdapter, Violation
from loraplex_services.worker.types.model_config import ModelConfig, RopeConfig

_WITH_ORIGINAL = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class BaseRopes:
    """The facts about a base from which adapters' own rotary embeddings are made."""

    layers: tuple[RopeConfig, ...]
    is_scaled: tuple[bool, ...]
    """By layer: whether an adapter's rope replaces it. Where a base has two, as Gemma 3, only those
    of full attention are scaled, as in its own config."""
    max_position_embeddings: int
    """The base's context in tokens."""


def base_ropes(config: ModelConfig) -> BaseRopes:
    """The rotary embeddings of a base."""
    is_one = len(set(config.ropes)) == 1
    is_scaled = tuple(is_one or window is None for window in config.windows)
    return BaseRopes(config.ropes, is_scaled, config.max_position_embeddings)


def own_ropes(base: BaseRopes, scaling: RopeScaling) -> tuple[RopeConfig, ...]:
    """The rotary embedding of each layer under an adapter.

    Raises:
        InvalidAdapter: the scaling is not for a base of this shape.
    """
    if not base.layers:
        description = "is not served on a base that runs through the transformers library"
        raise InvalidAdapter.of([Violation.of(FIELD, scaling.kind, description)])
    if any(rope.kind == "proportional" for rope in base.layers):
        description = "is not served on a base with proportional rotary embeddings"
        raise InvalidAdapter.of([Violation.of(FIELD, scaling.kind, description)])
    layers = zip(base.layers, base.is_scaled, strict=True)
    tokens = base.max_position_embeddings
    if not all(base.is_scaled):  # transformers does not see it there: see `gemma3`
        scaling = replace(scaling, params=tuple(p for p in scaling.params if p[0] != "truncate"))
    return tuple(_own(rope, scaling, tokens) if scaled else rope for rope, scaled in layers)


def switch_len_of(layers: tuple[RopeConfig, ...]) -> int | None:
    """Sequences of more tokens are rotated differently, from their first token on; None = none
    are."""
    return next((rope.switch_len for rope in layers if rope.switch_len is not None), None)


def _own(rope: RopeConfig, scaling: RopeScaling, base_tokens: int) -> RopeConfig:
    params = dict(scaling.params)
    if scaling.kind in _WITH_ORIGINAL:
        params.setdefault("original_max_position_embeddings", float(base_tokens))
    if scaling.kind == "longrope":
        for key in ("long_factor", "short_factor"):
            factors = params[key]
            assert isinstance(factors, tuple), "checked when it was read"
            if len(factors) != rope.dim // 2:
                description = f"must be a list of {rope.dim // 2} numbers, one for each pair"
                violation = Violation.of(f"{FIELD}.{key}", f"{len(factors)} numbers", description)
                raise InvalidAdapter.of([violation])
        original = params["original_max_position_embeddings"]
        assert isinstance(original, float), "checked when it was read"
        params.setdefault("factor", scaling.context_tokens(base_tokens) / original)
    theta = rope.theta if scaling.theta is None else scaling.theta
    if scaling.kind == "yarn" and theta == 1.0:
        description = "must be set: yarn divides by its logarithm, and the base's is 1"
        raise InvalidAdapter.of([Violation.of(f"{FIELD}.rope_theta", "", description)])
    if scaling.kind == "yarn" and rope.dim % 2:
        description = f"is not served on a base that rotates {rope.dim} components of a head"
        raise InvalidAdapter.of([Violation.of(FIELD, scaling.kind, description)])
    own = tuple(sorted(params.items()))
    return replace(rope, theta=theta, kind=scaling.kind, params=own)
