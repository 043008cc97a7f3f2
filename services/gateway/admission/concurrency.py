"""Sequences of one tenant that run at all gateways together: places leased like rates.

Each gateway asks for as many places as it could use and gets what the others do not want, and an
equal part of the limit as soon as their running requests leave room. Places held never exceed the
limit, whoever asks when; a lease ends by itself when its gateway is gone.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.gateway.admission.rate_limit_store import Reservoir
from services.gateway.registry.tenants import TenantLimits

ASK_INTERVAL_S = 0.25


class Door(Protocol):
    """The gate, as far as shares concern it."""

    def num_running_of(self, tenant: str) -> int: ...

    def set_share(self, tenant: str, num_places: int | None) -> None: ...


class Concurrency:
    """The leases of this gateway."""

    def __init__(self, reservoir: Reservoir, door: Door) -> None:
        self._reservoir = reservoir
        self._door = door
        self._limits: dict[str, int] = {}
        """Of tenants that hold a lease or want one."""
        self._wanted: dict[str, int] = {}
        """Sequences of theirs that wait or run here."""

    async def enter(self, limits: TenantLimits, num_sequences: int) -> None:
        """A request comes; the first of a tenant asks for a lease."""
        tenant = limits.tenant
        if not limits.max_concurrent:
            return
        is_new = tenant not in self._limits
        self._limits[tenant] = limits.max_concurrent
        self._wanted[tenant] = self._wanted.get(tenant, 0) + num_sequences
        if is_new:
            self._door.set_share(tenant, 0)
            await self._ask(tenant)

    def leave(self, limits: TenantLimits, num_sequences: int) -> None:
        """The request is gone; its place is given back at the next asking."""
        if limits.max_concurrent and limits.tenant in self._wanted:
            self._wanted[limits.tenant] -= num_sequences

    async def run(self) -> None:
        """Ask again and again: leases end, and others want their part."""
        while True:
            await asyncio.sleep(ASK_INTERVAL_S)
            for tenant in list(self._limits):
                await self._ask(tenant)

    async def _ask(self, tenant: str) -> None:
        """Mutates: limits and wanted; forgets a tenant without requests."""
        limit, wanted = self._limits[tenant], self._wanted[tenant]
        running = self._door.num_running_of(tenant)
        # With some to spare: the next request need not wait for an answer.
        spare = min(limit, 2 * wanted + 4) if wanted else 0
        share = await self._reservoir.hold(tenant, limit, spare, running)
        if wanted or self._wanted[tenant] or self._door.num_running_of(tenant):
            self._door.set_share(tenant, share)
        else:
            self._door.set_share(tenant, None)
            del self._limits[tenant], self._wanted[tenant]
