"""Plans where the recurrent states of a step are read and written."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.types.step_plan import PlannedRow, StateSpan


class StatePlanner:
    """Cuts rows where their state is to be kept, if there are blocks for that."""

    def __init__(self, prefixes: PrefixCache, reclaimer: Reclaimer) -> None:
        self._prefixes = prefixes
        self._states = prefixes.states
        self._reclaimer = reclaimer

    def spans(self, rows: Sequence[PlannedRow], now: float) -> tuple[tuple[StateSpan, ...], ...]:
        """State spans of each row of the latest plan; none if the base has no recurrent layers.

        Mutates the requests' `state_key`: afterwards it says where the state will be.
        """
        if not self._states.num_blocks:
            return ()
        return tuple(self._of_row(row, now) for row in rows)

    def _of_row(self, row: PlannedRow, now: float) -> tuple[StateSpan, ...]:
        request, end = row.request, row.start + row.num_tokens
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
        return tuple(spans)
