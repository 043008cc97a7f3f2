"""Charges tenants for requests and tokens, and refuses those over their rate.

A request is charged as one when it arrives, before any work is done for it, and as tokens once its
prompt is known: its prompt and the most that it may generate. What it did not generate is returned
when it ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from loraplex.api.tenants import TenantLimits
from loraplex.errors import LoraplexError, ResourceExhausted
from loraplex_services.gateway.admission.rate_limit_store import RateLimitStore
from loraplex_services.gateway.admission.token_buckets import Grant, Lease
from loraplex_services.gateway.clock import now_s

_MAX_LEASES = 200_000


class TenantRates:
    """The rates of tenants, charged against leases of this gateway."""

    def __init__(self, rate_limit_store: RateLimitStore, now: Callable[[], float] = now_s) -> None:
        self._rate_limit_store = rate_limit_store
        self._now = now
        self._leases: dict[str, Lease] = {}

    async def charge_request(self, limits: TenantLimits) -> None:
        """Charge one request, whatever becomes of it. Raises: ResourceExhausted."""
        await self._spend("requests", limits.tenant, limits.requests_per_s, 1.0)

    @asynccontextmanager
    async def charged(
        self, limits: TenantLimits, max_tokens: int, num_used: Callable[[], int]
    ) -> AsyncGenerator[None]:
        """Charge the tokens of a request, at most `max_tokens`; at the end return what it did not
        use.

        Raises: ResourceExhausted. The request is then returned: it waits for tokens, and its
        repetitions should not use up the rate of requests.
        """
        await self._charge_tokens(limits, max_tokens)
        try:
            yield
        finally:
            unused = float(max_tokens - num_used())
            await self._refund("tokens", limits.tenant, limits.tokens_per_s, unused)

    async def _charge_tokens(self, limits: TenantLimits, num_tokens: int) -> None:
        try:
            await self._spend("tokens", limits.tenant, limits.tokens_per_s, float(num_tokens))
        except LoraplexError:
            await self._refund("requests", limits.tenant, limits.requests_per_s, 1.0)
            raise

    async def _spend(self, unit: str, tenant: str, rate: float, amount: float) -> None:
        if rate <= 0:
            return
        name = f"{unit}:{tenant}"
        lease = self._lease(name)
        missing = lease.take(amount, rate, self._now())
        if missing > 0:
            await self._refill(lease, name, rate, missing, amount - missing)
        lease.count(amount)

    async def _refill(
        self, lease: Lease, name: str, rate: float, missing: float, taken: float
    ) -> None:
        """Get what is missing, and some more, from the store. Raises: ResourceExhausted."""
        grant = Grant(0.0)
        try:
            grant = await self._rate_limit_store.ask(
                name, rate, missing, lease.wish(missing, rate), 0.0
            )
        finally:
            lease.put(grant.amount - missing if grant.amount else taken, rate)
        if not grant.amount:
            unit, _, tenant = name.partition(":")
            raise ResourceExhausted(
                f"tenant {tenant!r} exceeds its limit of {rate:g} {unit} per second; retry in "
                f"{grant.wait_s:.1f} s, or ask an admin for more",
                reason=f"TENANT_{unit.upper()}_PER_S",
                retry_after_s=max(grant.wait_s, 0.001),
            )

    async def _refund(self, unit: str, tenant: str, rate: float, amount: float) -> None:
        if rate <= 0 or amount <= 0:
            return
        name = f"{unit}:{tenant}"
        excess = self._lease(name).put(amount, rate)
        if excess > 0:
            await self._rate_limit_store.ask(name, rate, 0.0, 0.0, excess)

    def _lease(self, name: str) -> Lease:
        if len(self._leases) >= _MAX_LEASES:
            self._leases.clear()
        return self._leases.setdefault(name, Lease())
