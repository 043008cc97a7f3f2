"""What a waiting request must find before it may start: a slot, memory, few enough adapters."""

from __future__ import annotations

from loraplex.errors import ResourceExhausted
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.scheduling.admission import peak_kv_blocks, too_large
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.policies import ServiceCounters, reserved_slots
from loraplex_services.worker.scheduling.running import RunningBatch
from loraplex_services.worker.types.request import Request


class Room:
    """Tests requests against the batch and the arena as they are. Changes nothing."""

    def __init__(
        self,
        limits: SchedulerLimits,
        layout: KvLayout,
        arena: Arena,
        cache: AdapterCache,
        running: RunningBatch,
        counters: ServiceCounters | None,
    ) -> None:
        self._limits = limits
        self._layout = layout
        self._arena = arena
        self._cache = cache
        self._running = running
        self._counters = counters

    def has_slot(self, request: Request, now: float) -> bool:
        """Whether the batch has a slot for it. The last ones are for the least-served tenant."""
        num_free = self._limits.max_running - len(self._running)
        if self._counters is None or num_free > reserved_slots(self._limits.max_running):
            return num_free > 0
        return num_free > 0 and self._counters.tenants.is_least_served(request.tenant, now)

    def has_memory(self, request: Request) -> bool:
        """The peak test, for which all that run are looked at only where not all of them could
        reach their full length; true when nothing runs, as `too_large` has been asked, and
        for what needs no KV cache."""
        if request.without_cache or not self._running:
            return True
        adapters = self._cache.held_blocks + self._cache.new_blocks(request.adapters.digests)
        left = self._arena.num_blocks - adapters
        num_tokens = self._running.max_num_tokens + request.max_num_tokens
        if self._layout.most_blocks(num_tokens, len(self._running) + 1) <= left:
            return True
        return peak_kv_blocks((*self._running, request), self._layout) <= left

    def has_too_many_adapters(self, digests: tuple[str, ...]) -> bool:
        """Whether a step with `digests` and what runs would have more adapters than it may."""
        limit = self._limits.max_loras
        return limit is not None and len(self._cache.in_use.union(digests)) > limit

    def too_large(self, request: Request) -> ResourceExhausted | None:
        """Refuses what would wait forever; adapters not fetched yet count nothing."""
        known = [digest for digest in request.adapters.digests if self._cache.known([digest])]
        left = self._arena.num_blocks - self._cache.pinned_blocks
        return too_large(request, self._layout, self._cache.unpinned_blocks(known), left)
