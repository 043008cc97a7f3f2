"""Will everything that runs fit in the arena until the end? Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from services.worker.memory.kv_blocks import KvLayout
from services.worker.request import Request


def peak_kv_blocks(requests: Iterable[Request], layout: KvLayout) -> int:
    """Upper bound on the KV blocks that `requests` hold together at any later moment.

    Each request holds its known tokens (prompts count as computed), grows by one token a step,
    and gives everything back when it reaches its last token. The sum is largest at a moment when
    one of them ends; sorted by remaining output, longest first, that is

        max over i of  i * left_i + sum of known_j, j <= i

    in tokens. Blocks add the rounding: one block for each request in each group. Prefill of one
    request while others decode can shift the moments, so the bound is a forecast, and preemption
    remains the way out when it fails.

    Source: S-LoRA's released scheduler (memory admission), in blocks and with KV groups.
    """
    by_left = sorted(
        ((r.max_num_tokens - r.num_tokens, r.num_tokens) for r in requests), reverse=True
    )
    peak = known = most = 0
    for count, (left, num_tokens) in enumerate(by_left, start=1):
        known += num_tokens
        most += layout.max_blocks(num_tokens + left)
        tokens = known + count * left
        peak = max(peak, min(_blocks(layout, tokens, count), most))
    return peak


def _blocks(layout: KvLayout, num_tokens: int, num_requests: int) -> int:
    """Upper bound for `num_requests` sequences of `num_tokens` together."""
    whole = num_tokens // layout.tokens_per_block + num_requests
    return sum(
        whole if window is None else min(whole, num_requests * layout.window_cap(window))
        for window in layout.windows
    )
