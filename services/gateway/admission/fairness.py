"""Virtual token counters: who of several tenants has been served least. Pure.

Source: Sheng et al., Fairness in Serving Large Language Models (VTC), with weights. A token of
output costs twice one of input. A tenant that comes back is lifted to the least-served one that is
here: time away earns no credit, and nobody here can be held up by it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

INPUT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0


_MAX_REMEMBERED = 4096
"""Tenants that are away and still remembered; beyond it the least served are forgotten."""


@dataclass(slots=True)
class ServiceCounters:
    """Weighted service of each tenant; only differences mean something."""

    counters: dict[str, float] = field(default_factory=dict)
    here: set[str] = field(default_factory=set)
    """Tenants with a request waiting or running."""
    departed: float = 0.0
    """Highest counter of those that left."""

    def arrive(self, tenant: str) -> None:
        """A tenant has a request here."""
        self.counters[tenant] = self._counter(tenant)
        self.here.add(tenant)

    def charge(self, tenant: str, num_input: int, num_output: int, weight: float) -> None:
        """Count tokens that a tenant was served, divided by its weight."""
        cost = num_input * INPUT_TOKEN_COST + num_output * OUTPUT_TOKEN_COST
        self.counters[tenant] += cost / weight

    def leave(self, tenant: str) -> None:
        """A tenant has no request here any more; what it had too much of stays on its account."""
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
        """Whether `tenant`, here or about to arrive, was served less than `other`, who is here."""
        return self._counter(tenant) < self.counters[other]

    def _counter(self, tenant: str) -> float:
        """Of one who is here or arrives: never below the least of those here."""
        if tenant in self.here:
            return self.counters[tenant]
        floor = self._floor()
        return max(self.counters.get(tenant, floor), floor)

    def _floor(self) -> float:
        return min((self.counters[name] for name in self.here), default=self.departed)
