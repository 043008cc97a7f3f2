"""Answers that are collected before they are sent, and where large ones are formatted. Limits on
their size: see `pipeline.collected_bytes`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from loraplex.api.output import (
    Candidate,
    RoutedExperts,
    TokenLogprob,
    WeightSpan,
    joined_spans,
)
from loraplex_services.common.limits import MAX_RUNNING
from loraplex_services.common.tenant_slots import TenantSlots
from loraplex_services.gateway.request import TextDelta

_NUM_FORMATTING = 2
"""Answers that are formatted in threads at a time, one of each tenant. The event loop shares the
GIL with them, and waits for each of them in turn."""


class LargeAnswers:
    """Formats large answers in threads: each would stop the event loop for tenths of a second."""

    def __init__(self) -> None:
        self._slots = TenantSlots(_NUM_FORMATTING, max_waiting_per_tenant=MAX_RUNNING)

    async def formatted(self, tenant: str, work: Callable[[], bytes]) -> bytes:
        """Run `work` in a thread, and return its result."""
        async with self._slots.held(tenant, "large answers"):
            return await asyncio.to_thread(work)


class CollectedLogprobs:
    """Logprobs as arrays of numbers. The garbage collector would have to visit thousands of small
    objects, which stops the event loop."""

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
        """The beginning of the experts, without any of them; None = there are none yet."""
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
