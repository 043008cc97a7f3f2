"""Divides the keys of generations into items of similar size; holds their partial results.

One sequence of 32,768 tokens must not make the step wait for a single program, so programs share
items instead of sequences. The division depends only on the number of keys of a row and on the
number of generations in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_services.worker.ops.attention import item_kernel
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.launch import num_programs

LARGEST_SPLIT = 1536
"""Keys of a row that is not cut where rows alone give every multiprocessor enough to do."""
LONG_SPLIT = 1024
"""Keys of an item at most of a row that is cut: they fill the gaps that other rows leave."""
FEW_SPLITS = 32
"""Items of a row of up to 32,768 keys, at most: joining more takes longer than they save."""
PROGRAMS_PER_PROCESSOR = 3
"""Pairs of item and KV head that a multiprocessor needs to read memory at full speed."""
MIN_STEPS = 2
"""Steps of an item at least: joining smaller ones takes longer than they save."""
TYPICAL_KEYS = 1024
"""Keys of a row for which small batches are split."""
MAX_SPLITS = 64
"""Items of a row at most, so that the workspace stays small: contexts of more than 32,768 tokens
have larger items."""
KEY_STEP = 64
"""Items are multiples of it, except the last of a row: the keys of a step of the loop over keys."""
ITEM_WORDS = item_kernel.ITEM_WORDS.value
LIST_CONSTANTS = {
    "KEY_STEP": KEY_STEP,
    "LONG_SPLIT": LONG_SPLIT,
    "FEW_SPLITS": FEW_SPLITS,
    "BLOCK_ROWS": 256,
    "BLOCK_SPLITS": MAX_SPLITS,
}
"""Compile-time arguments of `list_items`, which counts the items of BLOCK_ROWS rows at a time."""


def split_limit(num_rows: int, num_kv_heads: int, device: torch.device) -> int:
    """Keys of a row that is not cut, in a step of `num_rows` generations: the fewer rows, the
    smaller.

    It depends on the number of rows only, so captured steps know it.
    """
    wanted = num_programs(device, PROGRAMS_PER_PROCESSOR)
    pairs = num_rows * num_kv_heads
    if pairs >= wanted:
        return LARGEST_SPLIT
    steps = -(-TYPICAL_KEYS * pairs // (wanted * KEY_STEP))
    return min(max(MIN_STEPS, steps) * KEY_STEP, LARGEST_SPLIT)


def max_splits(max_keys: int, limit: int) -> int:
    """Items of a row that sees up to `max_keys` keys, at most."""
    if max_keys <= limit:
        return 1
    num_keys = min(max(limit, -(-max_keys // FEW_SPLITS)), LONG_SPLIT)
    return min(-(-max_keys // num_keys), MAX_SPLITS)


def list_items(
    items: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    sequences: Tensor,
    rows: tuple[int, int],
    window: int | None,
    limit: int,
) -> None:
    """Write the items of a step's generations.

    Args:
        items: int32 `[1 + n, 6]`, see the kernel. Mutated.
        positions, kv_slots: int64 `[num_tokens]`: position of each token, and its slot in the KV
            cache or -1 for padding.
        sequences: int32, for each generation the row of its block table.
        rows: token rows [begin, end) of the generations, not empty.
        window: of the layers that use the items.
        limit: keys of a row that is not cut: see `split_limit`.
    """
    begin, end = rows
    item_kernel.list_items[(end - begin,)](
        positions,
        kv_slots,
        sequences,
        items,
        sequences.stride(0),
        begin,
        end - begin,
        window or 0,
        limit,
        MAX_SPLITS,
        **LIST_CONSTANTS,
        num_warps=1,
    )


SPARE_ITEMS = 2048
"""Programs load their next item before they know whether there is one: at least as many as a launch
has programs."""


def empty_items(num_items: int, device: torch.device) -> Tensor:
    """int32 `[1 + num_items + SPARE_ITEMS, 6]` for `list_items`."""
    return torch.empty(1 + num_items + SPARE_ITEMS, ITEM_WORDS, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Partial results of the items of a row, which the one that finishes last joins. All layers of
    one size share the memory, since they run one after another."""

    values: Tensor
    """float32 `[items, num_heads, block_dim]`."""
    stats: Tensor
    """float32 `[items, num_heads, 2]`: maximum and sum."""
    num_finished: Tensor
    """int32 `[token rows, num_kv_heads]`: finished items of each row; zero between launches."""

    def holds(self, num_items: int, num_rows: int) -> bool:
        """Whether a step of that size fits."""
        return len(self.values) >= num_items and len(self.num_finished) >= num_rows


def make_partial_sums(
    num_items: int, num_rows: int, shape: HeadShape, device: torch.device
) -> PartialSums:
    """Workspace for `num_items` items of generations in the first `num_rows` token rows."""
    lines = num_items, shape.num_heads
    return PartialSums(
        torch.empty(*lines, shape.block_dim, dtype=torch.float32, device=device),
        torch.empty(*lines, 2, dtype=torch.float32, device=device),
        torch.zeros(num_rows, shape.num_kv_heads, dtype=torch.int32, device=device),
    )
