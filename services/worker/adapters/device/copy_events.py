"""Lets steps use an adapter before its last bytes have been copied to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from torch.cuda import Event

from loraplex_services.worker.adapters.pack.image import ImageIndex


class StallTimer:
    """Measures how long the stream of the steps waits for copies."""

    def __init__(self, now: Callable[[], Event]) -> None:
        """`now` makes an event in the current stream."""
        self._now = now
        self._waits: list[tuple[Event, Event]] = []
        self._known_s = 0.0

    def wait(self, copied: Event) -> None:
        """Make the current stream wait, and record when the wait begins."""
        self._waits.append((self._now(), copied))
        copied.wait()

    @property
    def total_s(self) -> float:
        """Seconds of all waits that are over."""
        over = [pair for pair in self._waits if all(event.query() for event in pair)]
        self._waits = [pair for pair in self._waits if pair not in over]
        waits_ms = (reached.elapsed_time(copied) for reached, copied in over)
        self._known_s += sum(max(0.0, wait_ms) for wait_ms in waits_ms) / 1e3
        return self._known_s


class CopyEvents:
    """Makes the stream of the steps wait, site by site, for the bytes that it is about to read.

    Extents are copied in the order of the image, with an event after each, so waiting for one
    extent also waits for all extents before it. The stream waits for each extent only once.
    """

    def __init__(self, index: ImageIndex, events: Sequence[Event], stalls: StallTimer) -> None:
        """`events`: for each extent, one that is recorded after its copy."""
        self._index = index
        self._events = events
        self._stalls = stalls
        self._num_waited = 0
        """Number of extents that the step's stream has waited for."""

    @property
    def is_done(self) -> bool:
        """Whether the step's stream has waited for everything."""
        return self._num_waited == len(self._events)

    def wait(self, site_id: int) -> None:
        """Let later work on the current stream read the adapter at a site."""
        self._wait(self._last_extents.get(site_id, -1) + 1)

    @cached_property
    def _last_extents(self) -> Mapping[int, int]:
        return last_extents(self._index)

    def wait_all(self) -> None:
        """Let later work on the current stream read, or overwrite, all extents."""
        self._wait(len(self._events))

    def _wait(self, num_extents: int) -> None:
        if num_extents <= self._num_waited:
            return
        self._num_waited = num_extents
        copied = self._events[num_extents - 1]
        if not copied.query():
            self._stalls.wait(copied)


def last_extents(index: ImageIndex) -> Mapping[int, int]:
    """The last extent of the image that holds a part of each site, by site id."""
    return {
        site.site_id: max((tile.extent for role in site.roles for tile in role.tiles), default=-1)
        for site in index.sites
    }
