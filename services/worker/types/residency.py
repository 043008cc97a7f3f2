"""The state of an adapter on this worker, and the actions of the engine on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.api.residency import Tier
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.extents import Extents


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the adapter in folder `path` into the arena and enter it under `slot`."""

    slot: int
    digest: str
    path: Path
    extents: Extents


@dataclass(frozen=True, slots=True)
class Evict:
    """Take `slot` out of the tables; its pages are already given back."""

    slot: int
    digest: str


@dataclass(slots=True, eq=False)
class CachedAdapter:
    """One adapter this worker knows."""

    digest: str
    path: Path
    num_pages: int
    """Number of arena pages that it fills; see `extents`."""
    max_rank: int
    tier: Tier = Tier.DISK
    on_disk: bool = True
    slot: int = -1
    """Row of the device tables while it is LOADING or on DEVICE."""
    first_pages: list[int] = field(default_factory=list)
    """First page of each of its extents in the arena."""
    num_running: int = 0
    """Number of running requests that use it."""
    pinned: bool = False
    unload: bool = False
    """Whether it leaves the device as soon as it is idle."""
    last_used_s: float = 0.0
    heat: float = -math.inf
    """Logarithm of the decaying count of its uses; see `eviction.LeastExpectedLoss`."""
    last_step: int = -1
    """The step that was planned last when a request ceased to use it."""
    facts: AdapterFacts = field(default_factory=AdapterFacts)
    """Known as soon as it has been on the device."""

    @property
    def is_idle(self) -> bool:
        """Whether it is on the device, unused and not pinned, so that it may be evicted."""
        return self.tier == Tier.DEVICE and not self.num_running and not self.pinned


def adapter_owner(digest: str) -> str:
    """Owner name of an adapter's pages in the arena."""
    return f"adapter {digest}"
