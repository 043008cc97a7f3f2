"""Loads the adapters of the next requests while these wait for a slot or for memory.

The copies run concurrently with the steps of the batch. A request that starts when another one ends
then finds its adapter on the device, and its slot is not idle during a copy. Only a few requests
are considered, because a request that ends frees memory for few. Loading for more of them would
take blocks that are needed before they start, and load adapters twice
(`benchmarks/scheduling/prefetch.py`).

Source: S-LoRA section 5.2 (prefetching by the waiting queue), with a bound on memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from loraplex.api.residency import Tier
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.scheduling.running import RunningBatch
from loraplex_services.worker.types.request import Request

NUM_REQUESTS = 4
"""Waiting requests whose adapters are loaded ahead."""
HORIZON_STEPS = 6
"""Number of steps for which running requests keep the blocks that they may need. A block that is
being filled cannot be reclaimed, so a copy should not take longer than this. With more steps,
blocks to load ahead are free less often."""


class Lookahead:
    """Decides which adapters load ahead of the requests that need them."""

    def __init__(
        self,
        layout: KvLayout,
        arena: Arena,
        cache: AdapterCache,
        reclaimer: Reclaimer,
        running: RunningBatch,
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._cache = cache
        self._reclaimer = reclaimer
        self._running = running

    def load(
        self, first: Request, others: Iterator[Request], protected: dict[str, None], now: float
    ) -> None:
        """Load for `first`, which cannot start, and for the `others` in the order in which they
        will. Only free and idle blocks are used, and none of an adapter that is `protected`.
        Mutates: protected, which gets the adapters of these requests."""
        spare_blocks: int | None = None
        for request in islice(chain([first], others), NUM_REQUESTS):
            digests = request.adapters.digests
            if not self._cache.known(digests):
                continue
            protected.update(dict.fromkeys(digests))
            for digest in digests:
                adapter = self._cache.get(digest)
                if adapter is None or adapter.tier != Tier.DISK:
                    continue
                if spare_blocks is None:
                    spare_blocks = self._spare_blocks()
                num_blocks = self._cache.new_blocks([digest])
                if num_blocks <= spare_blocks:
                    self._cache.load([digest], protected, now)
                    spare_blocks -= num_blocks

    def _spare_blocks(self) -> int:
        """Blocks that no running request can want within the horizon."""
        spare = self._arena.num_free + self._arena.num_retiring + self._reclaimer.idle_blocks()
        for request in self._running:
            end = min(request.num_tokens + HORIZON_STEPS, request.max_num_tokens)
            spare -= max(0, self._layout.missing_blocks(request, end))
        return spare
