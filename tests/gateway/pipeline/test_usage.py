"""What is counted apart between two reports of usage."""

from __future__ import annotations

import pytest

from loraplex_services.gateway.pipeline.label_limits import OTHER
from loraplex_services.gateway.pipeline.usage import MAX_COMBINATIONS, UsageCounter


@pytest.mark.hostile
async def test_combinations_of_adapters_of_one_tenant_are_limited_for_each_day() -> None:
    """Reports are sent every five seconds, and the registry keeps each model that they name."""
    counter = UsageCounter()
    for _ in range(2):
        for number in range(MAX_COMBINATIONS + 50):
            counter._of("2026-11-03", "globex", f"globex/a{number}+globex/b").requests += 1
            counter._of("2026-11-03", "globex", f"globex/a{number}").requests += 1
        taken = counter.take()
        combined = [key.model for key in taken if "+" in key.model]
        assert len(combined) == MAX_COMBINATIONS
        assert sum(counts.requests for counts in taken.values()) == 2 * (MAX_COMBINATIONS + 50)
        assert len([key for key in taken if key.model == OTHER]) == 1
    counter._of("2026-11-03", "acme", "acme/a+acme/b")
    counter._of("2026-11-04", "globex", "globex/x+globex/y")
    assert [key.model for key in counter.take()] == ["acme/a+acme/b", "globex/x+globex/y"]
