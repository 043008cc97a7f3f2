"""Pooled prompts that are computed completely in separate steps, without the KV cache.

Nothing is generated from them, so their KV would be kept only for other prompts with the same
beginning. If no such beginning is cached, a prompt that fits in one step needs no block of the
arena.

Attention has a pass without a cache only for a whole batch, so these prompts do not share a step
with others. While other requests run, at most every second step is for them, and it computes no
more prompt tokens than a step with decoding requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.cache.prefix_cache import PrefixCache
from loraplex_services.worker.scheduling.budget import TokenBudget
from loraplex_services.worker.scheduling.running import RunningBatch
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow


class UncachedPrompts:
    """Decides which prompts need no KV cache, and which steps compute them."""

    def __init__(
        self, layout: KvLayout, prefixes: PrefixCache, budget: TokenBudget, running: RunningBatch
    ) -> None:
        self._layout = layout
        self._prefixes = prefixes
        self._budget = budget
        self._running = running
        self._max_tokens = self._tokens_left = self._num_started = 0
        self.has_others_due = False
        """Whether the last step left out rows that use the cache."""

    def begin_step(self) -> None:
        """Note that a step is about to be planned."""
        self._max_tokens = self._budget.max_tokens_without_decoding(self._running)
        self._tokens_left = 0 if self.has_others_due else self._max_tokens
        self._num_started = 0

    def accepts(self, request: Request) -> bool:
        """Whether a waiting request is to be computed without the cache. A request with a recurrent
        state always has blocks."""
        if not request.pooling or self._layout.state_blocks:
            return False
        return request.num_pending <= self._max_tokens and not self._prefixes.match(request)

    def must_wait(self, request: Request) -> bool:
        """Whether a request that is accepted has to wait for a later step."""
        return request.num_pending > self._tokens_left

    def start(self, request: Request) -> None:
        """Note that the step that is being planned computes this request."""
        self._tokens_left -= request.num_pending
        self._num_started += 1

    def choose(self, rows: list[PlannedRow]) -> list[PlannedRow]:
        """Choose the rows of the step among all possible ones."""
        self.has_others_due = 0 < self._num_started < len(rows)
        return [row for row in rows if row.request.without_cache] if self._num_started else rows


def num_cached_tokens(rows: Sequence[PlannedRow]) -> int:
    """Positions of rows whose KV is kept."""
    return sum(row.num_tokens for row in rows if not row.request.without_cache)
