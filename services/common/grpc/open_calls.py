"""The open calls of a server: limits for each caller, and what /debug/state shows of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loraplex.errors import ResourceExhausted
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import METHODS, SERVICE_KEY_IDS, limits_of
from loraplex_services.common.nonzero_counter import NonzeroCounter

_OTHERS = "methods without a limit of their own"


@dataclass(frozen=True, slots=True, eq=False)
class OpenCall:
    """A call that has not ended."""

    method: str
    tenant: str
    begin_s: float


class OpenCalls:
    """Counts the open calls of each method and tenant."""

    def __init__(self) -> None:
        self._calls: dict[OpenCall, None] = {}
        """In the order in which they began."""
        self._counts: NonzeroCounter[tuple[str, str]] = NonzeroCounter()
        """Calls that count against a limit, by method and tenant."""

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[OpenCall]:
        """The calls, the oldest one first."""
        return iter(self._calls)

    @contextmanager
    def counted(self, method: str, caller: Caller) -> Iterator[None]:
        """Hold one call. Raises ResourceExhausted if the tenant has as many as it may have."""
        key = method if method in METHODS else _OTHERS, caller.tenant
        most = 0 if caller.key_id in SERVICE_KEY_IDS else limits_of(method).max_calls_per_tenant
        if most and self._counts[key] >= most:
            raise ResourceExhausted(
                f"tenant {caller.tenant!r} has {most} calls of {key[0]} open, which is the limit; "
                "end some of them first",
                reason="TOO_MANY_CALLS",
                retry_after_s=1.0,
            )
        call = OpenCall(method, caller.tenant, time.monotonic())
        self._calls[call] = None
        if most:
            self._counts[key] += 1
        try:
            yield
        finally:
            del self._calls[call]
            if most:
                self._counts.remove(key)
