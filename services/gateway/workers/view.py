"""What the router sees: immutable views of workers. No grpc."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Tier(enum.IntEnum):
    """Where an adapter is on a worker; higher is nearer to the device."""

    NONE = 0
    DISK = 1
    LOADING = 2
    DEVICE = 3


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's own account of its load."""

    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    max_distinct_adapters: int = 0
    steps: int = 0
    max_running_requests: int = 0
    """What its batch holds; 0 = not said."""
    is_full: bool = False
    """Memory or the token budget of its steps, not places, keep requests waiting."""


@dataclass(frozen=True, slots=True)
class Residency:
    """One adapter on one worker."""

    digest: str
    tier: Tier
    max_rank: int = 0
    device_bytes: int = 0
    pinned: bool = False
    running_requests: int = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as last heard of, with what this gateway has sent it since."""

    worker_id: str
    address: str
    base_id: str
    epoch: int = 0
    connected: bool = False
    """Its session stream is open."""
    ready: bool = False
    draining: bool = False
    stale: bool = False
    """Nothing was heard for several report intervals."""
    load: Load = Load()
    adapters: Mapping[str, Residency] = field(default_factory=dict)
    numerics: str = ""
    in_flight: int = 0
    """Requests of this gateway that have not ended."""
    in_flight_tokens: int = 0
    """Prompt tokens of those that have no first token yet."""
    asked: frozenset[str] = frozenset()
    """Adapters of those: on their way, whatever the worker has said of them so far."""

    @property
    def takes_requests(self) -> bool:
        """True when a new request may be sent there."""
        return self.connected and self.ready and not self.draining

    @property
    def num_requests(self) -> int:
        """Requests there: the worker's count, or our own where that is newer and larger."""
        reported = self.load.running_requests + self.load.waiting_requests
        return max(reported, self.in_flight)

    @property
    def num_places(self) -> int:
        """Requests of this gateway that it takes without a queue: what its batch holds less those
        of other gateways; while it is full, those that it has."""
        if self.load.is_full:
            return self.in_flight
        others = max(self.num_requests - self.in_flight, 0)
        return max(self.load.max_running_requests - others, 0)

    def tier_of(self, digest: str) -> Tier:
        """Where an adapter is."""
        found = self.adapters.get(digest)
        tier = found.tier if found is not None else Tier.NONE
        return max(tier, Tier.LOADING) if digest in self.asked else tier

    @property
    def num_loading(self) -> int:
        """Adapters on their way to the device."""
        said = sum(each.tier is Tier.LOADING for each in self.adapters.values())
        unsaid = (self.adapters.get(digest) for digest in self.asked)
        return said + sum(each is None or each.tier < Tier.LOADING for each in unsaid)
