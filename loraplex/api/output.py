"""What a request is answered with: finish reasons and logprobs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class FinishReason(enum.StrEnum):
    """Why a choice stopped growing, as OpenAI spells it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Candidate(NamedTuple):
    """One token with the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logprob of one token of a prompt or output, and of the most likely ones there."""

    token_id: int
    logprob: float
    top: tuple[Candidate, ...] = ()
    """Best first."""
