"""Charges tenants for requests and tokens, and refuses who is over the rate.

A request is charged its prompt and the most it may generate; what it did not generate is given
back when it ends.
"""

from __future__ import annotations

from collections.abc import Callable

from loraplex.errors import LoraplexError, ResourceExhausted
from services.gateway.admission.rate_limit_store import RateLimitStore
from services.gateway.admission.token_buckets import Grant, Lease
from services.gateway.event_loop import now_s
from services.gateway.registry.tenants import TenantLimits

_MAX_LEASES = 200_000


class TenantRates:
    """The leases of this gateway."""

    def __init__(self, rate_limit_store: RateLimitStore, now: Callable[[], float] = now_s) -> None:
        self._rate_limit_store = rate_limit_store
        self._now = now
        self._leases: dict[str, Lease] = {}

    async def charge(self, limits: TenantLimits, num_tokens: int) -> None:
        """Pay for a request of so many tokens, or nothing. Raises: ResourceExhausted."""
        await self._pay("requests", limits.tenant, limits.requests_per_s, 1.0)
        try:
            await self._pay("tokens", limits.tenant, limits.tokens_per_s, float(num_tokens))
        except LoraplexError:
            await self._unpay("requests", limits.tenant, limits.requests_per_s, 1.0)
            raise

    async def give_back(self, limits: TenantLimits, num_tokens: int) -> None:
        """Tokens that were paid for and not generated."""
        await self._unpay("tokens", limits.tenant, limits.tokens_per_s, float(num_tokens))

    async def _pay(self, unit: str, tenant: str, rate: float, amount: float) -> None:
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
        """Ask for what is missing and some more. Mutates: lease. Raises: ResourceExhausted."""
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
                f"tenant {tenant!r} is over its {rate:g} {unit} per second; try again in "
                f"{grant.wait_s:.1f} s, or ask an admin for more",
                reason=f"TENANT_{unit.upper()}_PER_S",
                retry_after_s=max(grant.wait_s, 0.001),
            )

    async def _unpay(self, unit: str, tenant: str, rate: float, amount: float) -> None:
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
