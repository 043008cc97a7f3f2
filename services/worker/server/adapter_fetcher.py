"""Fetches adapters for the engine, on demand or in advance, and keeps their files while they are
needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from loraplex.api.residency import AdapterResidency, Tier
from loraplex.errors import LoraplexError, Unavailable
from loraplex_services.worker.adapters.fetch.disk_cache import DiskAdapter, DiskCache
from loraplex_services.worker.adapters.fetch.pack_pool import PackPool
from loraplex_services.worker.adapters.fetch.source import AdapterSource
from loraplex_services.worker.server.engine_client import EngineClient
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.types.extents import count_pages_per_block
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Command,
    EngineReady,
    FetchFailed,
    Prefetch,
    ResidencyChange,
    UnloadAdapter,
    Unpin,
    WireError,
)

logger = logging.getLogger(__name__)


class AdapterFetcher:
    """Fetches adapters and tells the engine where their files are."""

    def __init__(
        self,
        status: StatusBoard,
        client: EngineClient,
        source: AdapterSource,
        disk: DiskCache,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`spawn` runs a coroutine in the background."""
        self._status, self._client = status, client
        self._source, self._disk = source, disk
        self._spawn = spawn
        self._pins: set[str] = set()
        self._pages_per_block = 1
        self._page_bytes = 0
        self._max_lora_bytes = 0

    def lease(self, digests: Iterable[str]) -> None:
        """Keep adapters on disk, whether they are there already or still to be fetched."""
        for digest in digests:
            self._disk.lease(digest)

    def release(self, digests: Iterable[str]) -> None:
        """End one lease of each adapter."""
        for digest in digests:
            self._disk.release(digest)

    async def load(self, digest: str, pin: bool, *, when_fetched: bool = False) -> AdapterResidency:
        """Fetch and load an adapter ahead of requests; returns once the device has it. If the
        engine is lost in the meantime, an earlier pin is sent to the next one.

        Args:
            when_fetched: return once the engine was told to load it, if there is space for it. The
                engine hears of later requests after that.
        """
        was_pinned = digest in self._pins
        self._disk.lease(digest)
        try:
            adapter = await self._source.ensure(digest)
            self._status.on_disk(adapter)
            if pin:
                self._pins.add(digest)
            self._client.send(_fetched(adapter), Prefetch(digest, pin))
            arrival = self._status.arrival(digest)
            if when_fetched and self._has_space(adapter):
                self._lease_until_copied(digest, arrival)
                return replace(self._status.adapter(digest), tier=Tier.LOADING)
            return replace(await arrival, pinned=digest in self._pins)
        except LoraplexError as error:
            if not (was_pinned and isinstance(error, Unavailable)):
                self._lose_pin(digest, error)
            raise
        finally:
            self._disk.release(digest)

    def _lease_until_copied(self, digest: str, arrival: asyncio.Future[AdapterResidency]) -> None:
        """Keep an adapter on disk until it is on the device, or will not be."""

        def settled(_: asyncio.Future[AdapterResidency]) -> None:
            self._disk.release(digest)
            if not arrival.cancelled():
                arrival.exception()  # asyncio would log it; the next request meets it again

        self._disk.lease(digest)
        arrival.add_done_callback(settled)

    def _lose_pin(self, digest: str, error: LoraplexError) -> None:
        if digest in self._pins:
            self._pins.discard(digest)
            logger.warning("pin lost", extra={"digest": digest, "reason": error.reason})

    def _has_space(self, adapter: DiskAdapter) -> bool:
        """Whether the device is certain to have space for an adapter whose image is known."""
        load = self._status.load
        num_blocks = -(-adapter.num_pages // self._pages_per_block)
        if load.is_full or not 0 < num_blocks < load.free_blocks:
            return False
        held_bytes = sum(
            other.device_bytes
            for other in self._status.adapters()
            if other.running_requests or other.pinned or other.tier == Tier.LOADING
        )
        return held_bytes + adapter.num_pages * self._page_bytes <= self._max_lora_bytes

    def unpin(self, digest: str) -> None:
        """Release a pin. An adapter that was to be loaded for it is not loaded, unless that has
        begun."""
        was_pinned = digest in self._pins
        self._pins.discard(digest)
        self._client.send(Unpin(digest))
        if was_pinned and self._status.adapter(digest).tier < Tier.LOADING:
            self._status.will_not_arrive(digest)

    def unload(self, digest: str) -> None:
        """Free an adapter as soon as no request uses it, or stop loading it."""
        self._pins.discard(digest)
        self._client.send(UnloadAdapter(digest))
        self._status.will_not_arrive(digest)

    def ensure_loaded(self, digest: str) -> None:
        """Tell the engine where an adapter is, after fetching it if it is not on disk."""
        adapter = self._disk.get(digest)
        if adapter is not None and adapter.num_pages:
            self._client.send(_fetched(adapter))
        else:
            self._spawn(self._fetch(digest))

    def engine_up(self, ready: EngineReady, epoch: int) -> None:
        """A new engine has started; no adapter is loaded there yet."""
        pool = PackPool(ready.info.geometry, ready.layout)
        self._source.pack_with(pool)
        self._pages_per_block = count_pages_per_block(ready.layout.block_bytes)
        self._page_bytes = ready.block_bytes // self._pages_per_block
        self._max_lora_bytes = ready.max_lora_bytes
        self._spawn(pool.warm_up())
        self._status.new_epoch(epoch, self._disk.adapters())
        for digest in self._pins:
            self._spawn(self._pin_again(digest))

    def residency_changed(self, changes: Iterable[ResidencyChange]) -> None:
        """Load again what the engine has dropped and requests still need. Forget the pins of
        adapters that it could not load, perhaps after `load` has returned: a copied adapter may
        still be refused before the next step."""
        for change in changes:
            digest, tier = change.residency.digest, change.residency.tier
            if change.error is None:
                if tier == Tier.NONE and self._disk.is_leased(digest):
                    self.ensure_loaded(digest)
            elif tier in (Tier.DISK, Tier.HOST):
                # As in `load`, the next engine gets a pin that only this one could not keep.
                if not isinstance(error := change.error.to_error(), Unavailable):
                    self._lose_pin(digest, error)

    async def _fetch(self, digest: str) -> None:
        try:
            adapter = await self._source.ensure(digest)
        except LoraplexError as error:
            self._tell(FetchFailed(digest, WireError.of(error)))
            return
        # Without a lease, it may have left the disk since. The engine must not hear of it then.
        if self._disk.get(digest) is not None:
            self._status.on_disk(adapter)
            self._tell(_fetched(adapter))

    async def _pin_again(self, digest: str) -> None:
        try:
            await self.load(digest, pin=True)
        except LoraplexError as error:
            if digest in self._pins:
                fields = {"digest": digest, "reason": error.reason}
                logger.warning("pin waits for the next engine", extra=fields)

    def _tell(self, command: Command) -> None:
        """Send to the engine unless it has ended; the next engine gets the command again."""
        if self._client.is_up:
            self._client.send(command)


def _fetched(adapter: DiskAdapter) -> AdapterFetched:
    return AdapterFetched(adapter.digest, str(adapter.path), adapter.max_rank, adapter.num_pages)
