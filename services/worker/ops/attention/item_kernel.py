"""The Triton program that cuts the keys of generations into items: see `work_items.py`."""

from __future__ import annotations

import triton
import triton.language as tl

ITEM_WORDS = tl.constexpr(6)


@triton.jit(
    do_not_specialize=[
        "sequence_stride", "first_row", "num_rows", "window", "split_limit", "max_splits"
    ]
)  # fmt: skip
def list_items(
    positions, kv_slots, sequences, items, sequence_stride, first_row, num_rows, window,
    split_limit, max_splits, KEY_STEP: tl.constexpr, LONG_SPLIT: tl.constexpr,
    FEW_SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Cut the keys of each generation into items: see `work_items`. Grid: one program for each row.

    `positions`, `kv_slots` int64 `[first_row + num_rows]`. `sequences` int32 `[num_rows]`: rows of
    the block tables. `items [1 + n, 6]` int32: the number of items, then for each its token row,
    sequence, first key, end key, and the first item and number of items of its row. They are in
    order of rows and keys. A row without a KV slot is padding: one item without keys.
    """
    row = tl.program_id(0)
    first_item = 0
    for begin in range(0, row, BLOCK_ROWS):
        rows = begin + tl.arange(0, BLOCK_ROWS)
        is_before = rows < row
        at = first_row + rows
        position = tl.load(positions + at, mask=is_before, other=0)
        kv_slot = tl.load(kv_slots + at, mask=is_before, other=-1)
        _, _, _, count = _split_keys(
            position, kv_slot, window, split_limit, max_splits, KEY_STEP, LONG_SPLIT, FEW_SPLITS
        )
        first_item += tl.sum(tl.where(is_before, count, 0), axis=0)
    position, kv_slot = tl.load(positions + first_row + row), tl.load(kv_slots + first_row + row)
    begin, end, span, count = _split_keys(
        position, kv_slot, window, split_limit, max_splits, KEY_STEP, LONG_SPLIT, FEW_SPLITS
    )
    split = tl.arange(0, BLOCK_SPLITS)
    is_split = split < count
    item_begin = begin + split * span
    item = items + (1 + first_item + split) * ITEM_WORDS
    same = tl.zeros_like(split)
    tl.store(item, first_row + row + same, mask=is_split)
    tl.store(item + 1, tl.load(sequences + row * sequence_stride) + same, mask=is_split)
    tl.store(item + 2, item_begin, mask=is_split)
    tl.store(item + 3, tl.minimum(item_begin + span, end), mask=is_split)
    tl.store(item + 4, first_item + same, mask=is_split)
    tl.store(item + 5, count + same, mask=is_split)
    if row == num_rows - 1:
        tl.store(items, first_item + count)


@triton.jit
def _split_keys(
    position, kv_slot, window, split_limit, max_splits, KEY_STEP: tl.constexpr,
    LONG_SPLIT: tl.constexpr, FEW_SPLITS: tl.constexpr,
):  # fmt: skip
    """First key, end key, keys of an item, number of items: see `work_items`."""
    position = position.to(tl.int32)
    begin = tl.where(window > 0, tl.maximum(0, position + 1 - window), 0)
    end = tl.where(kv_slot >= 0, position + 1, begin)
    num_keys = end - begin
    limit = tl.maximum(split_limit, (num_keys + FEW_SPLITS - 1) // FEW_SPLITS)
    limit = tl.where(num_keys > split_limit, tl.minimum(limit, LONG_SPLIT), split_limit)
    count = (num_keys + limit - 1) // limit
    count = tl.minimum(tl.maximum(count, 1), max_splits)
    span = (num_keys + count * KEY_STEP - 1) // (count * KEY_STEP) * KEY_STEP
    span = tl.maximum(span, KEY_STEP)
    return begin, end, span, tl.maximum((num_keys + span - 1) // span, 1)
