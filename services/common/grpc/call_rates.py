"""Limits how many calls per second a server answers for one tenant.

A call above the rate is delayed until the rate allows it, and refused if the delay would be too
long. Refusals are delayed as well, because a client that retries immediately would otherwise cost
as much as one that is served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeGuard

from loraplex.errors import LoraplexError, ResourceExhausted, codes_of
from loraplex_services.common.callers import ROOT, Caller
from loraplex_services.common.limits import (
    CALL_BURST,
    CALLS_PER_S,
    DOCUMENTS_PER_CALL,
    MAX_CALL_WAIT_S,
    REFUSED_CALLS,
    SERVICE_KEY_IDS,
)
from loraplex_services.common.lru_cache import LruCache

MAX_TENANTS = 10_000
MAX_DEBT_S = 10.0
"""Longest time in seconds for which one call of a tenant uses its rate up."""
REFUSAL_DELAY_S = 1.0
MAX_DELAYED = 1000
"""Most refusals that are delayed in one process; further ones are sent immediately."""


class CallRates:
    """The generic cell rate algorithm of ATM networks, which keeps for each tenant the time up to
    which its calls have used its rate."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._used_until_s: LruCache[str, float] = LruCache(MAX_TENANTS)

    async def wait(self, caller: Caller, num_calls: int) -> None:
        """Wait until a call that counts as `num_calls` is within the rate of its tenant. Services,
        and everybody where auth is off, do not wait.

        Raises:
            ResourceExhausted: it would have to wait longer than `MAX_CALL_WAIT_S`.
        """
        if not num_calls or caller.key_id in SERVICE_KEY_IDS:
            return
        wait_s = self._reserve(caller.tenant, num_calls)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def charge(self, caller: Caller, num_calls: int) -> None:
        """Count calls that did not wait. Later calls of the tenant wait for them instead. Those of
        an operator, whose lists show all tenants, do not."""
        if caller.key_id not in SERVICE_KEY_IDS and ROOT not in caller.scopes:
            now_s = self._now()
            used_until_s = max(now_s, self._used_until_s.get(caller.tenant) or 0.0)
            most_s = max(used_until_s, now_s + MAX_DEBT_S)
            self._used_until_s.put(
                caller.tenant, min(used_until_s + num_calls / CALLS_PER_S, most_s)
            )

    def _reserve(self, tenant: str, num_calls: int) -> float:
        """Seconds until the call may begin. Raises as `wait`."""
        now_s = self._now()
        used_until_s = max(now_s, self._used_until_s.get(tenant) or 0.0)
        wait_s = used_until_s + (num_calls - CALL_BURST) / CALLS_PER_S - now_s
        if wait_s > MAX_CALL_WAIT_S:
            raise ResourceExhausted(
                f"tenant {tenant!r} sends more than {CALLS_PER_S} calls per second; send fewer",
                reason="TOO_MANY_CALLS",
                retry_after_s=wait_s,
            )
        self._used_until_s.put(tenant, used_until_s + num_calls / CALLS_PER_S)
        return wait_s


class CallCost:
    """The price of one call, which is higher if it reads more documents than are included."""

    def __init__(self, rates: CallRates, caller: Caller, num_calls: int) -> None:
        """`num_calls`: the number of calls that it has been counted as."""
        self._rates, self._caller, self._num_calls = rates, caller, num_calls
        self._num_read = 0

    def add(self, num_read: int) -> None:
        """Count documents that the call has read."""
        self._num_read += num_read
        if (more := self._num_read // DOCUMENTS_PER_CALL - self._num_calls) > 0:
            self._num_calls += more
            self._rates.charge(self._caller, more)


_DELAYED_REASONS = frozenset({"TOO_MANY_CALLS", "TOO_MANY_WAITING", "TOO_MANY_WRONG_KEYS"})


class DelayedRefusals:
    """Holds back refusals: those of calls that are too many, and those of a tenant whose calls are
    refused more often than its rate allows. They hold no message in the meantime."""

    def __init__(self, rates: CallRates) -> None:
        self._rates = rates
        self._num_delayed = 0

    async def delay(self, error: Exception, caller: Caller | None = None) -> None:
        """Wait a moment if `error` says that the caller sends too much, and until a refusal is
        within the rate of a known caller's tenant, at most `MAX_CALL_WAIT_S`."""
        if self._num_delayed >= MAX_DELAYED or not _is_refusal(error):
            return
        self._num_delayed += 1
        try:
            if error.reason in _DELAYED_REASONS:
                await asyncio.sleep(REFUSAL_DELAY_S)
            elif caller is not None:
                await self._rates.wait(caller, REFUSED_CALLS)
        except ResourceExhausted:
            await asyncio.sleep(REFUSAL_DELAY_S)
        finally:
            self._num_delayed -= 1


def _is_refusal(error: Exception) -> TypeGuard[LoraplexError]:
    """Whether an error is the caller's fault."""
    return isinstance(error, LoraplexError) and codes_of(error).http < 500
