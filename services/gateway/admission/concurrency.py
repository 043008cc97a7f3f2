"""Limits how many sequences of a tenant run at all gateways together, through leases.

Each gateway asks for as many sequences as it could use. It gets what the others do not want, and an
equal part of the limit as soon as the others' running requests leave space. Leases never exceed the
limit in sum, in whatever order gateways ask. A lease expires when its gateway is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from loraplex.api.tenants import TenantLimits
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.admission.rate_limit_store import RateLimitStore

ASK_INTERVAL_S = 0.25


class TenantConcurrency:
    """The sequences that this gateway may run for each tenant with a limit."""

    def __init__(self, rate_limit_store: RateLimitStore, controller: AdmissionController) -> None:
        self._rate_limit_store = rate_limit_store
        self._controller = controller
        self._limits: dict[str, int] = {}
        """Limit of each tenant that holds or needs a lease; 0 = it has none any more."""
        self._wanted: dict[str, int] = {}
        """Sequences of each such tenant that wait or run here."""

    @asynccontextmanager
    async def held(self, limits: TenantLimits, num_sequences: int) -> AsyncGenerator[None]:
        """Count a request of a tenant while it waits or runs. The first one asks for a lease."""
        tenant = limits.tenant
        is_new = tenant not in self._limits
        if is_new and not limits.max_concurrent:
            yield
            return
        self._limits[tenant] = limits.max_concurrent
        self._wanted[tenant] = self._wanted.get(tenant, 0) + num_sequences
        try:
            if is_new:
                self._controller.set_limit(tenant, 0)
                await self._ask(tenant)
            yield
        finally:
            # Its part of the lease is returned at the next renewal.
            self._wanted[tenant] -= num_sequences

    async def run(self) -> None:
        """Renew the leases until cancelled: they expire, and other gateways need their part."""
        while True:
            await asyncio.sleep(ASK_INTERVAL_S)
            for tenant in list(self._limits):
                await self._ask(tenant)

    async def _ask(self, tenant: str) -> None:
        """Renew the lease of one tenant, or forget a tenant without requests or limit."""
        limit, wanted = self._limits[tenant], self._wanted[tenant]
        running = self._controller.queue.num_running_of(tenant)
        if not limit:
            self._controller.set_limit(tenant, None)
            if not wanted:
                del self._limits[tenant], self._wanted[tenant]
            return
        # Ask for more than is needed now: the next request need not wait for an answer.
        asked = min(limit, 2 * wanted + 4) if wanted else 0
        leased = await self._rate_limit_store.hold(tenant, limit, asked, running)
        if wanted or self._wanted[tenant] or self._controller.queue.num_running_of(tenant):
            self._controller.set_limit(tenant, leased)
        else:
            self._controller.set_limit(tenant, None)
            del self._limits[tenant], self._wanted[tenant]
