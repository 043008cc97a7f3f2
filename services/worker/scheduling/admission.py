"""Checks whether a waiting request may start: a slot, memory, and the number of adapters.

Memory is forecast: everything that runs must fit in the arena until its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from loraplex.errors import ResourceExhausted
from loraplex_services.common.virtual_counters import VirtualCounters
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.scheduling.limits import SchedulerLimits
from loraplex_services.worker.scheduling.running import RunningBatch
from loraplex_services.worker.types.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionTest:
    """Tests requests against the batch and the arena as they are. Changes nothing."""

    limits: SchedulerLimits
    layout: KvLayout
    arena: Arena
    cache: AdapterCache
    running: RunningBatch
    tenants: VirtualCounters

    def has_slot(self, request: Request, now: float) -> bool:
        """Whether the batch has a free slot for a request. The last slots are reserved for the
        least-served tenant."""
        num_free = self.limits.max_running - len(self.running)
        if num_free > reserved_slots(self.limits.max_running):
            return True
        return num_free > 0 and self.tenants.is_least_served(request.tenant, now)

    def has_memory(self, request: Request) -> bool:
        """Whether the forecast peak of KV memory fits in the arena. The forecast goes through all
        running requests only if they could not all reach their full length. True for requests that
        need no KV cache, and when nothing runs: `too_large` was checked before."""
        if request.without_cache or not self.running:
            return True
        adapters = self.cache.held_blocks + self.cache.new_blocks(request.adapters.digests)
        left = self.arena.num_blocks - adapters
        num_tokens = self.running.max_num_tokens + request.max_num_tokens
        if self.layout.most_blocks(num_tokens, len(self.running) + 1) <= left:
            return True
        return peak_kv_blocks((*self.running, request), self.layout) <= left

    def has_too_many_adapters(self, digests: tuple[str, ...]) -> bool:
        """Whether a step with `digests` and all adapters in use would exceed `max_loras`."""
        limit = self.limits.max_loras
        return limit is not None and len(self.cache.in_use.union(digests)) > limit

    def too_large(self, request: Request) -> ResourceExhausted | None:
        """Why a request would wait forever; None if it would not. Adapters that are not fetched yet
        count as nothing."""
        known = [digest for digest in request.adapters.digests if self.cache.known([digest])]
        left = self.arena.num_blocks - self.cache.pinned_blocks
        adapter_blocks = self.cache.unpinned_blocks(known)
        error = too_large(request, self.layout, adapter_blocks, left)
        return error or self.cache.beyond_share(known)


def reserved_slots(max_running: int) -> int:
    """Number of slots of a batch that are reserved for the least-served tenant.

    That tenant can then start immediately instead of waiting in a full batch for a request to
    end. The slots are idle only while the tenant uses less than its share. A few are enough,
    because they become free again as fast as other requests end.
    """
    return math.isqrt(max_running // 3)


def peak_kv_blocks(requests: Iterable[Request], layout: KvLayout) -> int:
    """Upper bound on the KV blocks that `requests` hold together at any later moment.

    Each request holds its known tokens (prompts count as computed), grows by one token a step,
    and gives everything back when it reaches its last token. The sum is largest at a moment when
    one of them ends; sorted by remaining output, longest first, that is

        max over i of  i * left_i + sum of known_j, j <= i

    in tokens. A recurrent state counts in full for as long as its request runs. Blocks add the
    rounding: one block for each request in each group. Prefill of one request while others decode
    can shift the moments, so the bound is a forecast, and preemption remains the way out when it
    fails.

    Source: S-LoRA's released scheduler (memory admission), in blocks and with KV groups.
    """
    size = layout.tokens_per_block
    caps = [layout.window_cap(window) for window in layout.windows if window is not None]
    num_full = layout.num_groups - len(caps)
    holders = (r for r in requests if not r.without_cache)
    by_left = sorted(
        ((r.sampling.max_tokens - len(r.output_ids), r) for r in holders), key=itemgetter(0)
    )
    peak = known = most = 0
    for count, (left, request) in enumerate(reversed(by_left), start=1):
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        known += num_tokens
        own = -(-(num_tokens + left) // size)
        most += num_full * own + layout.state_blocks
        whole = (known + count * left) // size + count
        blocks = num_full * whole + count * layout.state_blocks
        for cap in caps:
            most += min(own, cap)
            blocks += min(whole, count * cap)
        peak = max(peak, min(blocks, most))
    return peak


def too_large(
    request: Request, layout: KvLayout, adapter_blocks: int, num_blocks: int
) -> ResourceExhausted | None:
    """Why a request could not be served even if it had all of `num_blocks` to itself; None if it
    could."""
    kv_blocks = layout.max_blocks(request.max_num_tokens)
    if kv_blocks + adapter_blocks <= num_blocks:
        return None
    return ResourceExhausted(
        f"the request needs up to {kv_blocks} arena blocks for {request.max_num_tokens} tokens "
        f"and {adapter_blocks} for its adapters, but only {num_blocks} are not pinned: lower "
        "max_tokens or raise LORAPLEX_KV_MEMORY",
        reason="REQUEST_TOO_LARGE",
    )
