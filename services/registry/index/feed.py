"""The newest events of the index, read once per process for all of its watchers.

A watcher that read the stream itself would hold a connection to Redis for as long as it waits. A
hundred of them would take the whole pool, and nothing could be published.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from loraplex.errors import Unavailable
from loraplex_services.registry.index.events import MAX_READ, MAX_READ_BYTES, StoredEvent

logger = logging.getLogger(__name__)

MAX_KEPT = 2_000
"""Events kept in memory; a watcher that is further behind reads the index."""
MAX_KEPT_BYTES = 16 << 20
"""Most JSON of these events. Labels of one may have 0.4 MB, of which Python makes several times as
much."""
BLOCK_MS = 1000
_RETRY_S = 0.5


IsWanted = Callable[[Mapping[str, Any]], bool]
"""Whether a watcher reads the versions of an adapter that has changed, given its record as JSON."""


class FeedLost(Exception):
    """The index has another epoch, or no longer has the watcher's position."""


class EventFeed:
    """Follows the stream while there are watchers. Lives on the event loop."""

    def __init__(
        self,
        position: Callable[[], Awaitable[tuple[str, int]]],
        read: Callable[[str, int, int, int | None], Awaitable[list[StoredEvent]]],
    ) -> None:
        """`position()` gives the epoch and its last number, `read` events after a number; both
        raise Unavailable if there is no index."""
        self._position = position
        self._read = read
        self._epoch = ""
        self._last = 0
        """Number of the last event that was read."""
        self._is_current = False
        """Whether the last read brought events. A stream that gets events belongs to the current
        index."""
        self._kept: deque[StoredEvent] = deque()
        """Events up to `_last` without a gap."""
        self._kept_bytes = 0
        self._problem = ""
        self._watchers: list[IsWanted] = []
        self._task: asyncio.Task[None] | None = None
        self._round = asyncio.Event()
        """Set at the end of each read; the next one gets its own."""
        self.is_closed = False

    def state(self) -> dict[str, Any]:
        """The state of the feed, for /debug/state."""
        return {
            "epoch": self._epoch,
            "last_event": self._last,
            "num_kept_events": len(self._kept),
            "num_watchers": len(self._watchers),
            "problem": self._problem,
        }

    @asynccontextmanager
    async def joined(self, is_wanted: IsWanted = lambda record: True) -> AsyncIterator[None]:
        """Follow the stream for one more watcher."""
        self._watchers.append(is_wanted)
        if self._task is None:
            # Events from a time without watchers are not replayed.
            self._epoch, self._last, self._is_current = "", 0, False
            self._forget()
            self._task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self._watchers.remove(is_wanted)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    def num_wanting(self, record: Mapping[str, Any]) -> int:
        """How many watchers read the versions of an adapter that has changed."""
        return sum(is_wanted(record) for is_wanted in self._watchers)

    def close(self) -> None:
        """End all watches, because the process is about to end: they resume at another registry,
        and the drain need not wait for them."""
        self.is_closed = True
        self._round.set()

    async def after(self, epoch: str, number: int) -> list[StoredEvent] | None:
        """Events after a number, within `MAX_READ` and `MAX_READ_BYTES`; waits about `BLOCK_MS`
        for the first one.

        Returns None if the memory does not reach back so far, [] if nothing happened.

        Raises:
            FeedLost: the watcher needs a snapshot.
            Unavailable: there is no index at the moment, or the feed is closed.
        """
        if self.is_closed:
            raise Unavailable("this registry is ending; watch again")
        # The first round may have begun before the caller learned its number.
        for _ in range(2):
            if self._has_more(epoch, number):
                break
            await self._round.wait()
            if self._epoch == epoch and self._last == number:
                break
        if self._problem:
            raise Unavailable(self._problem, reason="INDEX_UNAVAILABLE")
        if self._epoch != epoch or self._last < number:
            raise FeedLost
        first = self._kept[0].number if self._kept else self._last + 1
        if number + 1 < first:
            return None
        begin = number + 1 - first
        found: list[StoredEvent] = []
        num_bytes = 0
        for i in range(begin, min(begin + MAX_READ, len(self._kept))):
            found.append(self._kept[i])
            num_bytes += self._kept[i].num_bytes
            if num_bytes >= MAX_READ_BYTES:
                break
        return found

    def _has_more(self, epoch: str, number: int) -> bool:
        return not self._problem and self._epoch == epoch and self._last > number

    async def _follow(self) -> None:
        while True:
            try:
                await self._read_once()
                self._problem = ""
            except Unavailable as error:
                self._problem = error.message
            except Exception:
                logger.exception("the events of the index cannot be read")
                self._problem = "the events of the index cannot be read; see the registry's log"
            self._round.set()
            self._round = asyncio.Event()
            if self._problem:
                await asyncio.sleep(_RETRY_S)

    async def _read_once(self) -> None:
        """Read what is new, waiting for it. Mutates: epoch, last, is_current, kept. Raises:
        Unavailable."""
        was_current, self._is_current = self._is_current, False
        if not was_current:
            epoch, last = await self._position()
            if epoch != self._epoch or last < self._last:
                self._epoch, self._last = epoch, last
                self._forget()
                return
        events = await self._read(self._epoch, self._last, MAX_READ, BLOCK_MS)
        self._is_current = bool(events)
        for event in events:
            if event.number != self._last + 1:
                self._forget()
            self._keep(event)
            self._last = event.number

    def _keep(self, event: StoredEvent) -> None:
        self._kept.append(event)
        self._kept_bytes += event.num_bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= self._kept.popleft().num_bytes

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0
