"""Decides when the next line of a batch job is sent: tenants take turns, and memory is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from loraplex_services.common.limits import MAX_BATCH_BYTES_IN_FLIGHT
from loraplex_services.common.tenant_slots import TenantSlots

_AHEAD = 2
"""Lines that are sent beyond those that may run, so that one waits when another ends. Admission
keeps them behind all other requests."""
_POLL_S = 0.02
_MAX_WAITING = 100_000
"""Runs bound their own lines."""


class Pace:
    """The lines that one gateway has sent and that have no answer yet."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit()` is how many lines may run now."""
        self._limit = limit
        self._turns = TenantSlots(1, max_held=1, max_waiting_per_tenant=_MAX_WAITING)
        self._num_running = 0
        self._num_bytes = 0

    async def acquire(self, tenant: str, num_bytes: int) -> None:
        """Wait until a line of this size may be sent."""
        async with self._turns.held(tenant, "batches"):
            while not self._fits(num_bytes):
                await asyncio.sleep(_POLL_S)
            self._num_running += 1
            self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """A line has its answer."""
        self._num_running -= 1
        self._num_bytes -= num_bytes

    @asynccontextmanager
    async def paused(self, tenant: str) -> AsyncGenerator[None]:
        """A line waits before it is sent again; others may run in the meantime."""
        self._num_running -= 1
        is_back = False
        try:
            yield
            await self.acquire(tenant, 0)
            is_back = True
        finally:
            self._num_running += not is_back

    def _fits(self, num_bytes: int) -> bool:
        if self._num_running >= self._limit() + _AHEAD:
            return False
        return not self._num_bytes or self._num_bytes + num_bytes <= MAX_BATCH_BYTES_IN_FLIGHT
