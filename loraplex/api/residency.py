"""The reports of a worker: where its adapters are, and its load."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Tier(enum.IntEnum):
    """How near to a worker's device an adapter is: the larger, the nearer."""

    NONE = 0
    """Not on the worker."""
    DISK = 1
    """Verified, in the disk cache."""
    HOST = 2
    """It is on disk, and its image is in the pinned host memory of a worker on a GPU."""
    LOADING = 3
    """On its way to the device."""
    DEVICE = 4
    """Usable in the next step."""


@dataclass(frozen=True, slots=True)
class AdapterResidency:
    """Where one adapter is on one worker."""

    digest: str
    tier: Tier
    max_rank: int = 0
    """The largest rank over its modules."""
    device_bytes: int = 0
    """Bytes that it holds in the arena."""
    pinned: bool = False
    """A pinned adapter is never evicted."""
    running_requests: int = 0
    """Number of running requests that use it."""
    host_bytes: int = 0
    """Bytes of its image in pinned host memory, also while it is on the device; 0 = it is not
    there."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is."""

    running_requests: int = 0
    """Number of requests in its batch."""
    waiting_requests: int = 0
    """Number of requests that have not been scheduled yet."""
    queued_tokens: int = 0
    """Number of prompt tokens that have not been computed yet."""
    free_blocks: int = 0
    """Number of arena blocks that are free, or held by idle adapters and prefixes."""
    total_blocks: int = 0
    """Number of arena blocks."""
    step_s: float = 0.0
    """The mean duration of recent steps; 0 = not known yet."""
    prefill_tokens_per_s: float = 0.0
    """The recent rate; 0 = not known yet."""
    max_distinct_adapters: int = 0
    """Most adapters in one step since the engine started."""
    steps: int = 0
    """Number of steps since the engine started."""
    max_running_requests: int = 0
    """The size of its batch; 0 = not reported."""
    is_full: bool = False
    """Whether requests wait for memory or for the token budget of its steps, not for a batch
    slot."""
    idle_blocks: int = 0
    """Those of `free_blocks` that idle adapters and prefixes hold until their space is needed."""
