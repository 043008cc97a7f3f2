"""Limits of tenants: remembered, refreshed in the background, kept while the registry is
unavailable."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.api.tenants import TenantLimits
from loraplex.errors import Unavailable
from loraplex_services.gateway.registry import tenants
from loraplex_services.gateway.registry.tenants import FRESH_S, TenantDirectory


class RegistryLookup:
    """Answers by script; counts questions."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.rate = 5.0
        self.is_away = False

    async def ask(self, tenant: str) -> TenantLimits:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise Unavailable("away")
        return TenantLimits(tenant, requests_per_s=self.rate)


class Clock:
    """Time by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_known_limits_are_requested_once_and_refreshed_in_the_background() -> None:
    registry, clock = RegistryLookup(), Clock()
    directory = TenantDirectory(registry.ask, clock)
    both = await asyncio.gather(directory.limits("t"), directory.limits("t"))
    assert [limits.requests_per_s for limits in both] == [5.0, 5.0]
    assert registry.num_asked == 1
    clock.now_s, registry.rate = FRESH_S + 1, 9.0
    assert (await directory.limits("t")).requests_per_s == 5.0
    await asyncio.sleep(0.01)
    assert (await directory.limits("t")).requests_per_s == 9.0
    assert registry.num_asked == 2


async def test_last_limits_hold_while_the_registry_is_away() -> None:
    registry, clock = RegistryLookup(), Clock()
    directory = TenantDirectory(registry.ask, clock)
    await directory.limits("t")
    registry.is_away, clock.now_s = True, 2 * FRESH_S
    for _ in range(3):
        assert (await directory.limits("t")).requests_per_s == 5.0
        await asyncio.sleep(0.01)
        clock.now_s += FRESH_S
    assert (await directory.limits("stranger")).requests_per_s == 0.0
    await directory.close()


async def test_tenants_beyond_those_that_are_remembered_end_no_limits_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenants, "MAX_REMEMBERED", 2)
    registry = RegistryLookup()
    directory = TenantDirectory(registry.ask, Clock())
    for tenant in ("a", "b", "c"):
        await directory.limits(tenant)
    registry.is_away = True
    found = [await directory.limits(tenant) for tenant in ("b", "c", "a")]
    assert [limits.requests_per_s for limits in found] == [5.0, 5.0, 0.0]
