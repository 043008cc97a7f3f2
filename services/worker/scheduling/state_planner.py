"""Plans where the recurrent states of a step are read and written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import kv_owner
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StateSpan

MAX_DRAFT_PART = 16
"""States after drafts take at most the arena's blocks divided by this number, or one state."""


class StatePlanner:
    """Cuts rows where their state is to be kept, if there are blocks for that.

    The state after each draft goes to blocks of its own, so that the state after the last accepted
    draft is there, whichever that is.
    """

    def __init__(self, arena: Arena, prefixes: PrefixCache, reclaimer: Reclaimer) -> None:
        self._arena = arena
        self._prefixes = prefixes
        self._states = prefixes.states
        self._reclaimer = reclaimer

    def free_for_drafts(self, num_drafts: int, now: float) -> int:
        """Free idle blocks for the states after the drafts of a step. Returns how many of the
        `num_drafts` drafts have blocks for their states."""
        num_blocks = self._states.num_blocks
        if not num_blocks:
            return num_drafts
        most = self._arena.num_blocks // (MAX_DRAFT_PART * num_blocks)
        num_drafts = min(num_drafts, max(1, most))
        if self._reclaimer.reclaim(num_drafts * num_blocks, now):
            return num_drafts
        return min(num_drafts, self._arena.num_free // num_blocks)

    def spans(self, rows: Sequence[PlannedRow], now: float) -> tuple[tuple[StateSpan, ...], ...]:
        """State spans of each row of the latest plan; none if the base has no recurrent layers.

        Mutates the requests' `state_key`: afterwards it says where the state will be.
        """
        if not self._states.num_blocks:
            return ()
        for row in rows:  # before snapshots take what is free
            request = row.request
            request.draft_states = [self._allocate(request) for _ in row.drafts]
        return tuple(self._of_row(row, now) for row in rows)

    def verified(self, request: Request, num_accepted: int, now: float) -> None:
        """Keep the state after the first `num_accepted` drafts of the step that ended."""
        if not request.draft_states:
            return
        states = [request.state_blocks, *request.draft_states]
        if num_accepted and request.state_key:  # of the token before the drafts
            self._states.give_back(request.state_key, now)
            request.state_key = b""
        request.state_blocks = states.pop(num_accepted)
        request.draft_states = []
        self._arena.free(kv_owner(request), list(chain.from_iterable(states)))

    def _allocate(self, request: Request) -> list[int]:
        return self._arena.allocate(kv_owner(request), self._states.num_blocks)

    def _of_row(self, row: PlannedRow, now: float) -> tuple[StateSpan, ...]:
        request, end = row.request, row.start + row.num_tokens - len(row.drafts)
        source: Sequence[int] = request.state_blocks if row.start else ()
        if request.state_key:
            source = self._states.blocks(request.state_key)
            self._states.give_back(request.state_key, now)
            request.state_key = b""
        spans, begin = [], row.start
        for mark in request.state_marks:
            if not begin < mark <= end:
                continue
            key = self._prefixes.state_key(request, mark)
            if key in self._states or not self._reclaimer.reclaim(self._states.num_blocks, now):
                continue
            target = self._states.take(key, mark, now)
            spans.append(StateSpan(mark - begin, source, target))
            source, begin = target, mark
            if mark == end:
                request.state_key = key
                self._states.use(key)
        if begin < end:
            spans.append(StateSpan(end - begin, source, request.state_blocks))
        for target in request.draft_states:
            spans.append(StateSpan(1, spans[-1].target, target))
        return tuple(spans)
