"""The results of a generation: finish reasons, logprobs, token counts and times."""

from __future__ import annotations

import enum
from array import array
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
    """The most likely tokens, best first, or those that the request lists, in its order."""
    rank: int = 0
    """For a token of the prompt: how many tokens are at least as likely, itself included. 0 = not
    known."""


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Logprobs of a prompt on their way from the worker's engine to the API that answers.

    There may be hundreds of thousands of them. As arrays of numbers, they cross two processes
    without becoming single objects on an event loop.
    """

    num_top: int = 0
    """Number of candidates of each position."""
    token_ids: bytes = b""
    """Little-endian uint32: each position's own token, then its candidates, best first."""
    logprobs: bytes = b""
    """Little-endian float32, in the same order."""
    ranks: bytes = b""
    """Little-endian uint32 for each position."""

    def __len__(self) -> int:
        """Number of positions, without the first token of the prompt, which has no logprob."""
        return len(self.logprobs) // (4 + 4 * self.num_top)

    def followed_by(self, further: PackedLogprobs) -> PackedLogprobs:
        """These logprobs with those of further positions, which have as many candidates."""
        return PackedLogprobs(
            further.num_top if further.logprobs else self.num_top,
            self.token_ids + further.token_ids,
            self.logprobs + further.logprobs,
            self.ranks + further.ranks,
        )

    def entries(self) -> tuple[TokenLogprob | None, ...]:
        """One entry for each token of the prompt; the first is None. Takes as long as `scored`."""
        return None, *self.scored()

    def scored(self) -> tuple[TokenLogprob, ...]:
        """One entry for each position. Takes 0.4 s for 262,144 logprobs, so event loops call it on
        a thread."""
        flat = list(map(Candidate, array("I", self.token_ids), array("f", self.logprobs)))
        step = 1 + self.num_top
        starts = range(0, len(flat), step)
        return tuple(
            TokenLogprob(*flat[i], tuple(flat[i + 1 : i + step]), rank)
            for i, rank in zip(starts, array("I", self.ranks), strict=True)
        )


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The shape of the choices that a mixture of experts makes for one token."""

    num_layers: int
    """All layers of the base. The numbers of a dense layer are 0."""
    num_active: int
    """Experts of one layer that compute a token."""
    expert_bytes: int
    """Bytes of an expert's number: 1, or 2 if there are more than 256 experts."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the experts of one token."""
        return self.num_layers * self.num_active * self.expert_bytes

    @property
    def dtype(self) -> str:
        """The numbers' type as NumPy names it."""
        return {1: "uint8", 2: "uint16"}[self.expert_bytes]


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that computed consecutive tokens of one prompt and its output."""

    start: int
    """Position of the first of these tokens, counted from the start of the prompt."""
    routing: RoutingShape
    experts: bytes = b""
    """Little-endian numbers `[tokens, layers, active]`. In each layer, they are in the order of
    their router weights, the largest first."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.experts) // self.routing.token_bytes

    @property
    def end(self) -> int:
        """Position after the last of these tokens."""
        return self.start + len(self)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, layers, and active experts, for `numpy.frombuffer(experts, dtype)`."""
        return len(self), self.routing.num_layers, self.routing.num_active

    @property
    def dtype(self) -> str:
        """The numbers' type as NumPy names it."""
        return self.routing.dtype

    def between(self, start: int, end: int) -> RoutedExperts:
        """The experts of positions [start, end), which must be among these."""
        size = self.routing.token_bytes
        own = self.experts[(start - self.start) * size : (end - self.start) * size]
        return RoutedExperts(start, self.routing, own)


def joined_experts(parts: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
    """Join the experts of consecutive tokens; None if there are none."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    experts = b"".join(part.experts for part in found)
    return RoutedExperts(found[0].start, found[0].routing, experts)


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
    """The adapters, the worker and the base that ran a request."""

    adapters: tuple[str, ...]
    """Adapters as tenant/name:vN; empty for the base."""
    digests: tuple[str, ...]
    """The digests of these adapters, in the same order."""
    worker_id: str
    base_id: str
    tokenizer_digest: str = ""
    """Digest of the tokenizer files and chat templates, which the digests of adapters do not
    cover."""


@dataclass(slots=True)
class Usage:
    """Token counts of a request. The gateway's grow while the request runs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Generated tokens of all choices."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had."""
    reasoning_tokens: int = 0
    """Generated tokens that are reasoning, in a chat over gRPC."""

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
