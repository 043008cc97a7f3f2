"""Keeps uploads from taking a registry's processor from its other calls.

Receiving, checking and writing a megabyte takes about 3 ms of processor time, on several threads.
Uploads rest between messages, so that while they arrive the process uses a quarter of one core, or
what its other calls need. Clients wait meanwhile, because HTTP/2 stops their streams.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import MIB, SERVICE_KEY_IDS
from loraplex_services.common.tenant_slots import TenantSlots

CORE_SHARE = 0.25
MIN_BYTES_PER_S = 50 * MIB
"""Bytes per second that all uploads together may send, however busy the registry is."""


class UploadPace:
    """Lets the messages of all uploads pass one at a time, in rotation between tenants."""

    def __init__(
        self,
        worked_s: Callable[[], float] = time.process_time,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`worked_s`: processor time of this process."""
        self._slots = TenantSlots(1)
        self._worked_s, self._now_s, self._sleep = worked_s, now_s, sleep
        self._seen = worked_s(), now_s()
        self._rest_s = 0.0
        """Seconds of the pause after the last message, counted from `_seen`."""

    async def wait(self, caller: Caller, num_bytes: int) -> None:
        """Wait until a message of this size, which was received, may be worked on. For services,
        and where auth is off, that is in the next cycle of the event loop."""
        async with self._slots.held(caller.tenant, "uploads"):
            self._rest_s = min(self._due_s(), num_bytes / MIN_BYTES_PER_S)
            await self._sleep(0 if caller.key_id in SERVICE_KEY_IDS else self._rest_s)

    def _due_s(self) -> float:
        """Seconds until the work so far is within its share of the time. Mutates: self."""
        (last_worked_s, last_s), self._seen = self._seen, (self._worked_s(), self._now_s())
        worked_s, now_s = self._seen
        due_s = (worked_s - last_worked_s) / CORE_SHARE - (now_s - last_s)
        return max(0.0, self._rest_s + due_s)
