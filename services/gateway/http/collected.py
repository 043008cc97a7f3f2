"""Answers that are collected before they are sent, and what they may hold.

A token with twenty logprobs takes thousands of bytes once it is formatted, and its experts take
hundreds. Requests with many choices and long answers would otherwise fill the memory of a gateway.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from loraplex.api.output import (
    Candidate,
    RoutedExperts,
    TokenLogprob,
    WeightSpan,
    joined_spans,
)
from loraplex.errors import ResourceExhausted
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import (
    MAX_COLLECTED_BYTES,
    MAX_COLLECTED_BYTES_PER_TENANT,
    SERVICE_KEY_IDS,
)
from loraplex_services.gateway.request import TextDelta

_DELTA_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES = 300, 100, 120
"""Approximate sizes of a formatted text delta, of each of its tokens and of each logprob."""


class CollectedLogprobs:
    """Logprobs as arrays of numbers. Thousands of small objects would have to be walked by the
    garbage collector, which stops the event loop."""

    def __init__(self) -> None:
        self._token_ids, self._logprobs = array("I"), array("d")
        """Each token with its logprob, then its alternatives."""
        self._ends = array("Q")
        """Where the numbers of each token end."""

    def extend(self, entries: Iterable[TokenLogprob]) -> None:
        """Add the logprobs of further tokens."""
        for entry in entries:
            for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top):
                self._token_ids.append(token_id)
                self._logprobs.append(logprob)
            self._ends.append(len(self._token_ids))

    def __iter__(self) -> Iterator[TokenLogprob]:
        """The logprobs of each token."""
        begin = 0
        for end in self._ends:
            token_ids, logprobs = self._token_ids[begin + 1 : end], self._logprobs[begin + 1 : end]
            top = tuple(map(Candidate, token_ids, logprobs))
            yield TokenLogprob(self._token_ids[begin], self._logprobs[begin], top)
            begin = end


class CollectedChoice:
    """Adds up the text deltas of one choice and keeps none of them, for the same reason."""

    def __init__(self, first: TextDelta) -> None:
        self._first = self._last = first
        self._texts = [first.text]
        self._token_ids, self._offsets = array("q", first.token_ids), array("q", first.offsets)
        self._logprobs = CollectedLogprobs()
        self._logprobs.extend(first.logprobs)
        self._spans: Iterable[WeightSpan] = first.spans
        self._routed: RoutedExperts | None = None
        """Where the experts begin, without any; None = there are none yet."""
        self._experts: list[bytes] = []
        self._add_experts(first.routed_experts)

    @property
    def num_deltas(self) -> int:
        """Number of text deltas."""
        return len(self._texts)

    def add(self, text_delta: TextDelta) -> None:
        """Add the next text delta."""
        self._last = text_delta
        self._texts.append(text_delta.text)
        self._token_ids.extend(text_delta.token_ids)
        self._offsets.extend(text_delta.offsets)
        self._logprobs.extend(text_delta.logprobs)
        self._spans = joined_spans((*self._spans, *text_delta.spans))
        self._add_experts(text_delta.routed_experts)

    def sum(self) -> TextDelta:
        """The complete choice as one text delta."""
        return TextDelta(
            index=self._first.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=self._logprobs,
            offsets=tuple(self._offsets),
            finish_reason=self._last.finish_reason,
            stop_reason=self._last.stop_reason,
            prompt_logprobs=self._first.prompt_logprobs,
            spans=tuple(self._spans),
            routed_experts=self._all_experts(),
        )

    def _add_experts(self, routed: RoutedExperts | None) -> None:
        if routed is None:
            return
        if self._routed is None:
            self._routed = replace(routed, experts=b"")
        self._experts.append(routed.experts)

    def _all_experts(self) -> RoutedExperts | None:
        if self._routed is None:
            return None
        return replace(self._routed, experts=b"".join(self._experts))


class CollectedBytes:
    """Bytes that the unfinished answers of one gateway hold, by tenant. No empty entries."""

    def __init__(self) -> None:
        self._by_tenant: Counter[str] = Counter()

    @contextmanager
    def counted(self, caller: Caller) -> Iterator[Callable[[TextDelta], None]]:
        """A function that counts each text delta of one answer until the answer ends. For callers
        without a tenant's key, it counts only experts, and those of each answer for itself.

        The function raises ResourceExhausted if the answers of the tenant hold too much.
        """
        if caller.key_id in SERVICE_KEY_IDS:
            yield _counting_experts()
            return
        tenant, mine = caller.tenant, 0

        def note(text_delta: TextDelta) -> None:
            nonlocal mine
            num_bytes = bytes_of(text_delta)
            mine += num_bytes
            self._by_tenant[tenant] += num_bytes
            held, total = self._by_tenant[tenant], self._by_tenant.total()
            is_over = total > MAX_COLLECTED_BYTES and held > total / len(self._by_tenant)
            if is_over or held > MAX_COLLECTED_BYTES_PER_TENANT:
                raise _too_large()

        try:
            yield note
        finally:
            self._by_tenant[tenant] -= mine
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]


def _counting_experts() -> Callable[[TextDelta], None]:
    """A function that raises ResourceExhausted if one answer has too many experts. Nothing else
    bounds those of its output, and formatting makes several copies of them."""
    held = 0

    def note(text_delta: TextDelta) -> None:
        nonlocal held
        held += _expert_bytes(text_delta)
        if held > MAX_COLLECTED_BYTES_PER_TENANT:
            raise _too_large()

    return note


def _too_large() -> ResourceExhausted:
    return ResourceExhausted(
        "the answers under way are too large to be sent as a whole; stream them (experts over "
        "gRPC), or ask for fewer choices, logprobs or experts at a time",
        reason="ANSWERS_TOO_LARGE",
        retry_after_s=1.0,
    )


def _expert_bytes(text_delta: TextDelta) -> int:
    return 0 if text_delta.routed_experts is None else len(text_delta.routed_experts.experts)


def bytes_of(text_delta: TextDelta) -> int:
    """Approximate memory of a text delta."""
    num_logprobs = sum(1 + len(entry.top) for entry in text_delta.logprobs)
    if (prompt := text_delta.prompt_logprobs) is not None:
        num_logprobs += len(prompt) * (1 + prompt.num_top)
    num_bytes = _TOKEN_BYTES * len(text_delta.token_ids) + _LOGPROB_BYTES * num_logprobs
    return _DELTA_BYTES + num_bytes + _expert_bytes(text_delta)
