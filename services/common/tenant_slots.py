"""A bounded number of slots that tenants get in rotation.

While several tenants wait, each gets a slot in rotation, however many requests one of them has
queued. No tenant holds all slots at the same time, so one remains for the others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loraplex.errors import ResourceExhausted
from loraplex_services.common.nonzero_counter import NonzeroCounter


class TenantSlots:
    """Hands out slots. Every `take` that returned needs one `give`."""

    def __init__(
        self, num_slots: int, *, max_held: int = 0, max_waiting_per_tenant: int = 256
    ) -> None:
        """`max_held`: how many slots a tenant may hold; 0 = all but one, if there are more."""
        self._num_free = num_slots
        self._most_held = max_held or max(1, num_slots - 1)
        self._max_waiting = max_waiting_per_tenant
        self._held: NonzeroCounter[str] = NonzeroCounter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting requests by tenant; the tenant that is next comes first."""

    async def take(self, tenant: str, what: str) -> None:
        """Wait for a slot.

        Args:
            what: names the work in the error, such as "grammars".

        Raises:
            ResourceExhausted: the tenant has too many requests waiting.
        """
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= self._max_waiting:
            raise ResourceExhausted(
                f"tenant {tenant!r} has {len(queue)} requests waiting for {what}; try again later",
                reason="TOO_MANY_WAITING",
                retry_after_s=1.0,
            )
        future = asyncio.get_running_loop().create_future()
        queue.append(future)
        self._grant()
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.give(tenant)  # granted in the same moment as the waiter was cancelled
            else:
                self._remove(tenant, future)
            raise

    def take_free(self, tenant: str) -> bool:
        """Take a slot if the tenant may have one immediately. Returns whether it did."""
        is_free = self._num_free > 0 and self._held[tenant] < self._most_held
        if is_free:
            self._num_free -= 1
            self._held[tenant] += 1
        return is_free

    def give(self, tenant: str) -> None:
        """Return a slot."""
        self._num_free += 1
        self._held.remove(tenant)
        self._grant()

    @asynccontextmanager
    async def held(self, tenant: str, what: str) -> AsyncIterator[None]:
        """Hold a slot in the meantime. Raises as `take` does."""
        await self.take(tenant, what)
        try:
            yield
        finally:
            self.give(tenant)

    def _grant(self) -> None:
        """Give free slots to the tenants that wait, in rotation."""
        while self._num_free:
            tenant = next((t for t in self._waiting if self._held[t] < self._most_held), None)
            if tenant is None:
                return
            future = self._waiting[tenant].popleft()
            self._waiting.move_to_end(tenant)
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if future.done():  # its waiter was cancelled in this moment
                continue
            self._num_free -= 1
            self._held[tenant] += 1
            future.set_result(None)

    def _remove(self, tenant: str, future: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and future in queue:
            queue.remove(future)
            if not queue:
                del self._waiting[tenant]
