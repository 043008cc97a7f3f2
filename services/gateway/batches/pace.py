"""Decides when the next line of a batch job is sent: tenants take turns, and memory is bounded.

Large lines take turns of their own, because they wait until earlier ones have their results. Two
of them would otherwise hold up the batch jobs of all tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from loraplex_services.common.limits import MAX_BATCH_BYTES_IN_FLIGHT, MAX_SMALL_MESSAGE_BYTES
from loraplex_services.common.tenant_slots import TenantSlots

_AHEAD = 2
"""Lines that are sent beyond those that may run, so that one waits when another ends. Admission
keeps them behind all other requests."""
_POLL_S = 0.02
_MAX_WAITING = 100_000
"""Runs bound their own lines."""


class Pace:
    """The lines that one gateway has sent and whose results are not stored yet."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit()` is how many lines may run now."""
        self._limit = limit
        self._turns = _one_at_a_time()
        self._large_turns = _one_at_a_time()
        self._num_running = 0
        self._num_bytes = 0
        """Of the large lines."""

    async def acquire(self, tenant: str, num_bytes: int) -> None:
        """Wait until a line of this size may be sent."""
        if num_bytes > MAX_SMALL_MESSAGE_BYTES:
            async with self._large_turns.held(tenant, "batches"):
                while self._num_bytes and self._num_bytes + num_bytes > MAX_BATCH_BYTES_IN_FLIGHT:
                    await asyncio.sleep(_POLL_S)
                self._num_bytes += num_bytes
        try:
            async with self._turns.held(tenant, "batches"):
                while self._num_running >= self._limit() + _AHEAD:
                    await asyncio.sleep(_POLL_S)
                self._num_running += 1
        except BaseException:
            self._give_back(num_bytes)
            raise

    def release(self, num_bytes: int) -> None:
        """The result of a line is stored."""
        self._num_running -= 1
        self._give_back(num_bytes)

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

    def _give_back(self, num_bytes: int) -> None:
        if num_bytes > MAX_SMALL_MESSAGE_BYTES:
            self._num_bytes -= num_bytes


def _one_at_a_time() -> TenantSlots:
    return TenantSlots(1, max_held=1, max_waiting_per_tenant=_MAX_WAITING)
