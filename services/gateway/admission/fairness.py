"""Virtual token counters: which of several tenants has been served least. Pure.

Source: Sheng et al., Fairness in Serving Large Language Models (VTC), with weights. An output token
costs twice as much as an input token. A tenant that returns is raised to the least served tenant
that is active: it earns no credit for its absence, and cannot hold up the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

INPUT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0


_MAX_REMEMBERED = 4096
"""Inactive tenants that are remembered; beyond this the least served are forgotten."""


@dataclass(slots=True)
class VirtualTokenCounters:
    """Weighted service of each tenant; only differences are meaningful."""

    counters: dict[str, float] = field(default_factory=dict)
    here: set[str] = field(default_factory=set)
    """Tenants with a request waiting or running."""
    departed: float = 0.0
    """Highest counter of those that left."""

    def arrive(self, tenant: str) -> None:
        """A tenant became active, or has another request."""
        self.counters[tenant] = self._counter(tenant)
        self.here.add(tenant)

    def charge(self, tenant: str, num_input: int, num_output: int, weight: float) -> None:
        """Add tokens to a tenant's counter, divided by its weight."""
        cost = num_input * INPUT_TOKEN_COST + num_output * OUTPUT_TOKEN_COST
        self.counters[tenant] += cost / weight

    def leave(self, tenant: str) -> None:
        """A tenant has no more requests; its counter is kept while it is above the active ones."""
        self.here.discard(tenant)
        self.departed = max(self.departed, self.counters[tenant])
        if len(self.counters) > len(self.here) + _MAX_REMEMBERED:
            floor = self._floor()
            kept = {t: c for t, c in self.counters.items() if t in self.here or c > floor}
            self.counters = kept

    def least_served(self, tenants: Collection[str]) -> str:
        """One of `tenants`; ties go to the first by name."""
        return min(tenants, key=lambda tenant: (self.counters[tenant], tenant))

    def is_less_served(self, tenant: str, other: str) -> bool:
        """Whether `tenant` was served less than the active tenant `other`."""
        return self._counter(tenant) < self.counters[other]

    def _counter(self, tenant: str) -> float:
        """The counter of an active or arriving tenant, at least that of the least served active
        one."""
        if tenant in self.here:
            return self.counters[tenant]
        floor = self._floor()
        return max(self.counters.get(tenant, floor), floor)

    def _floor(self) -> float:
        return min((self.counters[name] for name in self.here), default=self.departed)
