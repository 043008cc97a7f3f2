"""Keeps the large messages of one tenant from blocking the event loop for others.

Parsing a large message blocks the event loop for milliseconds. Each tenant therefore has a small
share of the loop's time for large messages: after each one, its next one waits.
"""

from __future__ import annotations

import asyncio
import time

from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import (
    MAX_SMALL_MESSAGE_BYTES,
    MAX_WAITING_MESSAGES_PER_TENANT,
    SERVICE_KEY_IDS,
)
from loraplex_services.common.tenant_slots import TenantSlots

LOOP_SHARE = 1 / 200
"""Part of the event loop's time that the large messages of one tenant may take: below the
hundredth that the slowest requests of the others are."""
_MAX_TENANTS = 1024


class LargeMessages:
    """The large messages of one server."""

    def __init__(self, share: float = LOOP_SHARE) -> None:
        self._share = share
        self._slots = TenantSlots(
            _MAX_TENANTS, max_held=1, max_waiting_per_tenant=MAX_WAITING_MESSAGES_PER_TENANT
        )

    async def wait(self, caller: Caller, num_bytes: int) -> None:
        """Wait until a message of this size may be parsed. Small ones, those of services, and all
        where auth is off do not wait.

        What the caller's task does until it next waits for something counts as the message's time.

        Raises:
            ResourceExhausted: the tenant has too many large messages waiting.
        """
        if num_bytes <= MAX_SMALL_MESSAGE_BYTES or caller.key_id in SERVICE_KEY_IDS:
            return
        await self._slots.take(caller.tenant, "large messages")
        asyncio.get_running_loop().call_soon(self._rest, caller.tenant, time.thread_time())

    def _rest(self, tenant: str, begin_s: float) -> None:
        """Called when the task that is being served waits."""
        rest_s = (time.thread_time() - begin_s) / self._share
        asyncio.get_running_loop().call_later(rest_s, self._slots.give, tenant)
