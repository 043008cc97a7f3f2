"""Counts the open calls of each caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex.errors import ResourceExhausted
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import SERVICE_KEY_IDS, limits_of


class OpenCalls:
    """Counts the open calls of each method and tenant. Entries without calls are dropped."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def counted(self, method: str, caller: Caller) -> Iterator[None]:
        """Hold one call. Raises ResourceExhausted if the tenant has as many as it may have."""
        most = limits_of(method).max_calls_per_tenant
        if not most or caller.key_id in SERVICE_KEY_IDS:
            yield
            return
        key = (method, caller.tenant)
        if self._counts[key] >= most:
            raise ResourceExhausted(
                f"tenant {caller.tenant!r} has {most} calls of {method} open, which is the limit",
                reason="TOO_MANY_CALLS",
                retry_after_s=1.0,
            )
        self._counts[key] += 1
        try:
            yield
        finally:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
