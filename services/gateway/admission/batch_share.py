"""Limits how much of the workers' batches one tenant fills while others are present.

A tenant that is alone may fill them. Once another tenant has sent a request, no tenant gets more
than half, so that the next request of the other tenant finds a free slot and need not wait until a
sequence of the first one ends. An operator sets another limit with `registry tenants set
--max-concurrent`."""

from __future__ import annotations

import math

ACTIVE_S = 60.0
"""How long a tenant counts as present after its last request, in seconds."""


class BatchShare:
    """Remembers when tenants sent requests: of the newest tenant, and of the one before it."""

    def __init__(self) -> None:
        self._tenant = ""
        self._seen_s = -math.inf
        self._other_s = -math.inf
        """When the tenant before `_tenant` sent its last request."""

    def seen(self, tenant: str, now_s: float) -> None:
        """A tenant sent a request."""
        if tenant != self._tenant:
            self._tenant, self._other_s = tenant, self._seen_s
        self._seen_s = now_s

    def of_tenant(self, batch_capacity: int, now_s: float) -> int:
        """Sequences that each tenant may run; 0 = no limit.

        Args:
            batch_capacity: sequences that the workers run at once; 0 = not known.
        """
        if not batch_capacity or now_s - self._other_s > ACTIVE_S:
            return 0
        return max(1, batch_capacity // 2)
