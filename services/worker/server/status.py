"""The worker's state for gateways: a snapshot, then changes, in numbered epochs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace

from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex.errors import Conflict, LoraplexError
from loraplex_services.worker.adapters.fetch.disk_cache import DiskAdapter
from loraplex_services.worker.types.messages import ResidencyChange, WireError

MIN_INTERVAL_S = 0.02
"""Shortest interval between two messages to one watcher; changes in between are sent together."""
MAX_INTERVAL_S = 1.0
"""Longest interval in seconds between two messages, which serve as a sign of life."""


@dataclass(frozen=True, slots=True)
class StatusUpdate:
    """One message to one watcher."""

    epoch: int
    sequence: int
    is_full: bool
    is_ready: bool
    is_draining: bool
    load: WorkerLoad
    adapters: tuple[AdapterResidency, ...]


class _Watcher:
    """The changes that one stream has not received yet."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self.needs_full = True
        self.wake = asyncio.Event()


class StatusBoard:
    """Holds the state and tells watchers what changed."""

    def __init__(self) -> None:
        self.epoch = 0
        self.is_ready = False
        self.is_draining = False
        self.load = WorkerLoad()
        self.disk_bytes: Callable[[], int] = lambda: 0
        """Bytes in the disk cache."""
        self._adapters: dict[str, AdapterResidency] = {}
        self._watchers: set[_Watcher] = set()
        self._is_closed = False
        self._waiters: dict[str, list[asyncio.Future[AdapterResidency]]] = {}

    def adapter(self, digest: str) -> AdapterResidency:
        """Where an adapter is; its tier is NONE if it is not on this worker."""
        return self._adapters.get(digest) or AdapterResidency(digest, Tier.NONE)

    def adapters(self) -> Iterable[AdapterResidency]:
        """Everything on this worker."""
        return self._adapters.values()

    def new_epoch(self, epoch: int, on_disk: Iterable[DiskAdapter]) -> None:
        """Begin an epoch with a new engine: all adapters are only on disk."""
        self.epoch = epoch
        self._adapters = {
            a.digest: AdapterResidency(a.digest, Tier.DISK, a.max_rank) for a in on_disk
        }
        for watcher in self._watchers:
            watcher.needs_full = True
        self.touch()

    def update(self, changes: Iterable[ResidencyChange], load: WorkerLoad) -> None:
        """Apply the changes of one step."""
        self.load = load
        for change in changes:
            self._note(change.residency, change.error)
        self.touch()

    def on_disk(self, adapter: DiskAdapter) -> None:
        """Note that an adapter was fetched, unless the engine has reported it already."""
        if adapter.digest not in self._adapters:
            self._note(AdapterResidency(adapter.digest, Tier.DISK, adapter.max_rank))
            self.touch()

    def touch(self) -> None:
        """Wake the watchers."""
        for watcher in self._watchers:
            watcher.wake.set()

    def off_disk(self, digest: str) -> None:
        """Note that an adapter's files are gone. A copy on the device stays until it is evicted."""
        if self.adapter(digest).tier in (Tier.DISK, Tier.HOST):
            self._note(AdapterResidency(digest, Tier.NONE))
            self.touch()

    def arrival(self, digest: str) -> asyncio.Future[AdapterResidency]:
        """Resolves when an adapter is on the device, or with the error that prevented it."""
        waiter: asyncio.Future[AdapterResidency] = asyncio.get_running_loop().create_future()
        others = (other for other in self._waiters.get(digest, ()) if not other.done())
        self._waiters[digest] = [*others, waiter]
        return waiter

    def will_not_arrive(self, digest: str) -> None:
        """Fail those who wait for an adapter, which the engine no longer loads for them."""
        why = (
            f"adapter {digest} was unloaded or unpinned before it was on the device: load it again"
        )
        _settle(self._waiters.pop(digest, []), Conflict(why, reason="UNLOADED"))

    def arrived(self, digest: str, device_bytes: int) -> None:
        """Resolve what waits for an adapter that requests can use from now on."""
        entry = replace(self.adapter(digest), tier=Tier.DEVICE, device_bytes=device_bytes)
        _settle(self._waiters.pop(digest, []), entry)

    def close(self) -> None:
        """End all watches."""
        self._is_closed = True
        self.touch()

    def fail_waiters(self, error: LoraplexError) -> None:
        """Fail everything that waits for the engine, which has ended."""
        waiting, self._waiters = self._waiters, {}
        for waiters in waiting.values():
            _settle(waiters, error)

    async def watch(self) -> AsyncIterator[StatusUpdate]:
        """A snapshot, then changes, until `close`."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        sequence = 0
        try:
            while True:
                sequence += 1
                yield self._update_for(watcher, sequence)
                if self._is_closed:
                    return
                await asyncio.sleep(MIN_INTERVAL_S)
                try:
                    await asyncio.wait_for(watcher.wake.wait(), MAX_INTERVAL_S)
                except TimeoutError:
                    continue
        finally:
            self._watchers.discard(watcher)

    def _note(self, entry: AdapterResidency, error: WireError | None = None) -> None:
        if entry.tier == Tier.NONE:
            self._adapters.pop(entry.digest, None)
        else:
            self._adapters[entry.digest] = entry
        for watcher in self._watchers:
            watcher.changed.add(entry.digest)
        if error is not None:
            _settle(self._waiters.pop(entry.digest, []), error.to_error())
        elif entry.tier == Tier.DEVICE:
            _settle(self._waiters.pop(entry.digest, []), entry)

    def _update_for(self, watcher: _Watcher, sequence: int) -> StatusUpdate:
        watcher.wake.clear()
        digests = self._adapters if watcher.needs_full else watcher.changed
        update = StatusUpdate(
            self.epoch,
            sequence,
            watcher.needs_full,
            self.is_ready,
            self.is_draining,
            self.load,
            tuple(self.adapter(digest) for digest in digests),
        )
        watcher.needs_full, watcher.changed = False, set()
        return update


def _settle(
    waiters: list[asyncio.Future[AdapterResidency]], result: AdapterResidency | LoraplexError
) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if isinstance(result, LoraplexError):
            waiter.set_exception(result)
        else:
            waiter.set_result(result)
