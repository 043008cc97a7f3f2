"""Which pins an API server process gives to the next engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex.errors import DataLoss, LoraplexError, Unavailable
from loraplex_services.worker.adapters.fetch.disk_cache import DiskAdapter
from loraplex_services.worker.server.adapter_fetcher import AdapterFetcher
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.types.messages import ResidencyChange, WireError

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
    fetcher._pages_per_block = 32
    adapter = DiskAdapter("a", Path(), 8, "", 0, num_pages)
    assert fetcher._has_space(adapter) == has_space
