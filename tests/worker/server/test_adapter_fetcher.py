"""Which pins an API server process gives to the next engine."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.api.residency import AdapterResidency, Tier
from loraplex.errors import DataLoss, LoraplexError, Unavailable
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
