"""What a generation returns: finish reasons, logprobs, token counts and times."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class FinishReason(enum.StrEnum):
    """Why a choice stopped growing, as OpenAI spells it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ABORT = "abort"


class Candidate(NamedTuple):
    """One token with the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logprob of one token of a prompt or output, and of alternatives there."""

    token_id: int
    logprob: float
    top: tuple[Candidate, ...] = ()
    """The most likely ones, best first, or those that the request lists, in its order."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Consecutive output tokens of one choice that the same adapters computed."""

    start: int
    """Output position of the first of them, counted from 0."""
    num_tokens: int
    digests: tuple[str, ...]
    """Empty for the base."""


def joined_spans(spans: Iterable[WeightSpan]) -> tuple[WeightSpan, ...]:
    """The spans in order, with adjacent spans of the same adapters joined."""
    joined: list[WeightSpan] = []
    for span in spans:
        if joined and joined[-1].digests == span.digests:
            before = joined.pop()
            span = WeightSpan(before.start, before.num_tokens + span.num_tokens, span.digests)
        joined.append(span)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class ServedBy:
    """What ran a request."""

    adapters: tuple[str, ...]
    """Adapters as tenant/name:vN; empty for the base."""
    digests: tuple[str, ...]
    """The digests of these adapters, in the same order."""
    worker_id: str
    base_id: str


@dataclass(slots=True)
class Usage:
    """Token counts of a request. The gateway's grow while the request runs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Generated tokens of all choices."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of all choices."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that one choice spent on its worker."""

    queue_s: float = 0.0
    """Time from arrival to the first step."""
    load_s: float = 0.0
    """The part of `queue_s` that was spent waiting for adapters."""
    prefill_s: float = 0.0
    """Time from the first step to the first token."""
