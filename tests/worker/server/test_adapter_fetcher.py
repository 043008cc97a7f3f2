"""What an API server process pins, keeps on disk, and loads with an early answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex.errors import DataLoss, LoraplexError, Unavailable
from loraplex_services.worker.adapters.fetch.disk_cache import DiskAdapter, DiskCache
from loraplex_services.worker.server.adapter_fetcher import AdapterFetcher
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.types.messages import Command, ResidencyChange, WireError

DAMAGED, LOST = DataLoss("the image is damaged"), Unavailable("a rank was lost")


@pytest.mark.parametrize(
    ("tier", "error", "is_kept"),
    [(Tier.DISK, DAMAGED, False), (Tier.DISK, LOST, True), (Tier.DEVICE, DAMAGED, True)],
)
def test_a_pin_ends_with_a_load_that_failed_after_it_was_said_to_have_succeeded(
    tier: Tier, error: LoraplexError, is_kept: bool
) -> None:
    unused: Any = None
    fetcher = AdapterFetcher(StatusBoard(), unused, unused, unused, unused)
    fetcher._pins.add("a")
    change = ResidencyChange(AdapterResidency("a", tier), WireError.of(error))
    fetcher.residency_changed([change])
    assert ("a" in fetcher._pins) == is_kept


@pytest.mark.parametrize(
    ("num_pages", "load", "has_space"),
    [
        (64, WorkerLoad(free_blocks=3), True),
        (64, WorkerLoad(free_blocks=2), False),
        (64, WorkerLoad(free_blocks=3, is_full=True), False),
        (64, WorkerLoad(), False),
        (0, WorkerLoad(free_blocks=3), False),
    ],
    ids=["enough", "just enough", "requests wait for memory", "unknown", "not packed yet"],
)
def test_a_load_returns_early_only_if_the_device_has_space(
    num_pages: int, load: WorkerLoad, has_space: bool
) -> None:
    unused: Any = None
    status = StatusBoard()
    status.load = load
    fetcher = AdapterFetcher(status, unused, unused, unused, unused)
    fetcher._pages_per_block, fetcher._max_lora_bytes = 32, 1 << 20
    adapter = DiskAdapter("a", Path(), 8, "", 0, num_pages)
    assert fetcher._has_space(adapter) == has_space


@pytest.mark.parametrize(
    ("other", "has_space"),
    [
        (AdapterResidency("b", Tier.DEVICE, device_bytes=100), True),
        (AdapterResidency("b", Tier.DEVICE, device_bytes=36, running_requests=1), True),
        (AdapterResidency("b", Tier.DEVICE, device_bytes=37, running_requests=1), False),
        (AdapterResidency("b", Tier.DEVICE, device_bytes=37, pinned=True), False),
        (AdapterResidency("b", Tier.LOADING, device_bytes=37), False),
    ],
    ids=["idle", "both fit", "in use", "pinned", "loading"],
)
def test_a_load_returns_early_only_if_adapters_may_hold_that_much_memory(
    other: AdapterResidency, has_space: bool
) -> None:
    unused: Any = None
    status = StatusBoard()
    status.update([ResidencyChange(other)], WorkerLoad(free_blocks=100))
    fetcher = AdapterFetcher(status, unused, unused, unused, unused)
    fetcher._pages_per_block, fetcher._page_bytes, fetcher._max_lora_bytes = 32, 1, 100
    assert fetcher._has_space(_on_disk("a", 64)) == has_space


class Source:
    """A source whose adapters are on disk already, or that fails."""

    def __init__(self) -> None:
        self.error: LoraplexError | None = None

    async def ensure(self, digest: str) -> DiskAdapter:
        if self.error is not None:
            raise self.error
        return _on_disk(digest, 64)


class Engine:
    """An engine that only listens."""

    def send(self, *commands: Command) -> None: ...


def _on_disk(digest: str, num_pages: int) -> DiskAdapter:
    return DiskAdapter(digest, Path(), 8, "", 0, num_pages)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def fetcher(source: Source, tmp_path: Path) -> Iterator[AdapterFetcher]:
    """A fetcher whose device has space."""
    disk = DiskCache(tmp_path, 1 << 20, lambda digest: None)
    engine: Any = Engine()
    fetches: Any = source
    made = AdapterFetcher(StatusBoard(), engine, fetches, disk, asyncio.ensure_future)
    made._status.load = WorkerLoad(free_blocks=100)
    made._pages_per_block, made._page_bytes, made._max_lora_bytes = 32, 1, 100
    yield made
    disk.close()


@pytest.mark.parametrize("error", [None, DAMAGED], ids=["copied", "not copied after all"])
async def test_an_adapter_stays_on_disk_after_an_early_answer_until_it_is_copied(
    fetcher: AdapterFetcher, error: LoraplexError | None
) -> None:
    status, disk = fetcher._status, fetcher._disk
    residency = await fetcher.load("a", pin=False, when_fetched=True)
    assert residency.tier == Tier.LOADING and disk.is_leased("a")
    tier = Tier.DISK if error else Tier.DEVICE
    wire_error = WireError.of(error) if error else None
    status.update([ResidencyChange(AdapterResidency("a", tier), wire_error)], status.load)
    await asyncio.sleep(0)
    assert not disk.is_leased("a")


async def test_a_lost_pin_is_logged_once(
    fetcher: AdapterFetcher, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher._pins |= {"a", "b"}
    pinning = asyncio.ensure_future(fetcher._pin_again("a"))
    await asyncio.sleep(0)
    change = ResidencyChange(AdapterResidency("a", Tier.DISK), WireError.of(DAMAGED))
    fetcher._status.update([change], fetcher._status.load)
    fetcher.residency_changed([change])
    await pinning
    assert caplog.messages == ["pin lost"]
    source.error = DAMAGED
    await fetcher._pin_again("b")
    assert caplog.messages == ["pin lost", "pin lost"]
