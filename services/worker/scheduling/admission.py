"""Forecasts whether everything that runs fits in the arena until its end. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.errors import ResourceExhausted
from loraplex_services.worker.cache.kv_blocks import KvLayout
from loraplex_services.worker.types.request import Request


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
    by_left = sorted(((r.sampling.max_tokens - len(r.output_ids), r) for r in holders), key=_left)
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
    """Why a request cannot be served though it had all of `num_blocks` for itself."""
    kv_blocks = layout.max_blocks(request.max_num_tokens)
    if kv_blocks + adapter_blocks <= num_blocks:
        return None
    return ResourceExhausted(
        f"the request needs up to {kv_blocks} arena blocks for {request.max_num_tokens} tokens "
        f"and {adapter_blocks} for its adapters, but only {num_blocks} are not pinned: lower "
        "max_tokens or "
        "raise LORAPLEX_KV_MEMORY",
        reason="REQUEST_TOO_LARGE",
    )


def _left(pair: tuple[int, Request]) -> int:
    return pair[0]
