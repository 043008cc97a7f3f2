"""The load of one gateway in the last minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The part of one model in `RecentLoad`."""

    model: str
    """tenant/name of the adapter, several joined by +, or the id of the base."""
    requests: int
    errors: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class RecentLoad:
    """The requests that ended at one gateway within the last `window_s`."""

    window_s: float
    requests: int
    """Refused ones included."""
    failures: Mapping[str, int]
    """Failed and refused requests by reason."""
    prompt_tokens: int
    generated_tokens: int
    first_token_p50_s: float
    """Median time from arrival to first token; 0 if there was none."""
    first_token_p95_s: float
    duration_p50_s: float
    """Median time from arrival to end of the requests that were served."""
    duration_p95_s: float
    models: tuple[ModelLoad, ...]
    """At most 100, those with most generated tokens first."""
