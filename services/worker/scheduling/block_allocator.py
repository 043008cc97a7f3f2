"""Allocates and frees the blocks of running requests, and preempts some if blocks run out."""

from __future__ import annotations

from collections.abc import Callable

from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import (
    KvLayout,
    grow_tables,
    kv_owner,
    release_behind_windows,
    release_tables,
)
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.scheduling.running import Member, RunningBatch, running_order
from loraplex_services.worker.types.request import RELEASED_BLOCK, Request


class BlockAllocator:
    """Gives running requests blocks for the positions of their next step."""

    def __init__(
        self,
        layout: KvLayout,
        arena: Arena,
        prefixes: PrefixCache,
        reclaimer: Reclaimer,
        running: RunningBatch,
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._prefixes = prefixes
        self._reclaimer = reclaimer
        self._running = running
        self._has_windows = any(window is not None for window in layout.windows)

    def wanted(self, shares: dict[str, int]) -> dict[Member, int]:
        """The number of positions to allocate for each request that may need more blocks.

        Args:
            shares: tokens of each request that does not decode.
        """
        wanted = {m: m.request.num_computed + 1 for m in self._decoding_into_new_blocks()}
        for request_id, num_tokens in shares.items():
            member = self._running.prompts[request_id]
            wanted[member] = member.request.num_computed + num_tokens
        return wanted

    def grow_all(self, wanted: dict[Member, int], now: float) -> bool:
        """Allocate blocks for all of `wanted`, in order of arrival. Returns False if there are not
        enough; then only blocks behind windows have been freed."""
        if self._has_windows:
            self._release_passed(now)
        needs = (self._layout.missing_blocks(m.request, n) for m, n in wanted.items())
        if not self._reclaimer.reclaim(sum(max(0, missing) for missing in needs), now):
            return False
        members = {member.request.request_id: member for member in wanted}
        for request in running_order(member.request for member in wanted):
            member = members[request.request_id]
            self.grow(member, wanted[member], now)
        return True

    def grow_some(
        self, wanted: dict[Member, int], preempt: Callable[[Request], None], now: float
    ) -> bool:
        """Preempt the newest requests until the others have their blocks. True if any was
        preempted."""
        members = {member.request.request_id: member for member in self._running.members()}
        queue = [members[request.request_id] for request in running_order(self._running)]
        num_before = len(queue)
        index = 0
        while index < len(queue):
            member = queue[index]
            if member not in wanted or self.grow(member, wanted[member], now):
                index += 1
            else:
                preempt(queue.pop().request)
        return len(queue) < num_before

    def grow(self, member: Member, num_tokens: int, now: float) -> bool:
        """Allocate blocks for positions [0, num_tokens) of one request. False if there are not
        enough."""
        request = member.request
        if request.without_cache:
            return True
        missing = self._layout.missing_blocks(request, num_tokens)
        if missing > 0:
            if not self._reclaimer.reclaim(missing, now):
                return False
            grow_tables(self._arena, self._layout, request, num_tokens)
        member.num_allocated = len(request.block_tables[0]) * self._layout.tokens_per_block
        return True

    def grow_further(self, shares: dict[str, int], left: int, now: float) -> None:
        """Extend prompts that were cut to what others left of the step's budget, if there are
        blocks."""
        for request_id, num_tokens in shares.items():
            member = self._running.prompts[request_id]
            request = member.request
            more = 0 if request.is_held else min(request.num_pending - num_tokens, left)
            if more and self.grow(member, request.num_computed + num_tokens + more, now):
                shares[request_id] += more
                left -= more

    def leave(self, request: Request, now: float) -> None:
        """Free all blocks of a request, which then has nothing computed."""
        self._prefixes.leave(request, release_tables(request), now)
        request.num_computed = 0

    def check_integrity(self) -> None:
        """Assert that the arena and the tables of running requests agree on every block."""
        by_owner = self._arena.blocks_by_owner()
        for request in self._running:
            tables = [*request.block_tables, request.state_blocks, *request.draft_states]
            held = [block for table in tables for block in table if block != RELEASED_BLOCK]
            own = [block for block in held if not self._prefixes.is_cached(block)]
            owned = by_owner.get(kv_owner(request), set())
            assert len(own) == len(owned) and set(own) == owned, request.request_id

    def _decoding_into_new_blocks(self) -> list[Member]:
        return [
            member
            for member in self._running.decoding
            if member.request.num_computed >= member.num_allocated and not member.request.must_wait
        ]

    def _release_passed(self, now: float) -> None:
        """Free the blocks behind attention windows."""
        for request in self._running:
            if passed := release_behind_windows(self._layout, request):
                self._prefixes.give_back(request, passed, now, passed=True)
