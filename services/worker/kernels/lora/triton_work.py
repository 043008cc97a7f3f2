"""How much work a step's runs make at each site, and which of it an item is. Triton programs.

Runs are `[MAX_RUNS, 4]` int32 (slot, first row, end row, float32 bits of the coefficient); unused
ones have no rows. Counts are `ends [2, num_sites, MAX_RUNS]` int32: the number of items of runs
0..i at a site, for shrink and for expand. Runs with at most `short_max` rows are cut with the short
sizes, others with the long ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(8)
RUN_WORDS = tl.constexpr(4)


@triton.jit(
    do_not_specialize=[
        "num_sites", "short_max", "short_rows", "short_ranks", "short_split",
        "short_outputs", "long_rows", "long_ranks", "long_split", "long_outputs",
    ]
)  # fmt: skip
def count_work(
    runs,
    index,
    records,
    in_features,
    ends,
    num_sites,
    short_max,
    short_rows,
    short_ranks,
    short_split,
    short_outputs,
    long_rows,
    long_ranks,
    long_split,
    long_outputs,
    MAX_RUNS: tl.constexpr,
):
    """ends[:, site, i] = items of runs 0..i. Grid: one program for each site."""
    site = tl.program_id(0)
    i = tl.arange(0, MAX_RUNS)
    slot = tl.load(runs + i * RUN_WORDS)
    num_rows = tl.load(runs + i * RUN_WORDS + 2) - tl.load(runs + i * RUN_WORDS + 1)
    used = num_rows > 0
    entry = tl.load(index + slot.to(tl.int64) * num_sites + site, mask=used, other=-1).to(tl.int64)
    used = used & (entry >= 0)
    is_short = num_rows <= short_max
    block_rows = tl.where(is_short, short_rows, long_rows)
    split_inputs = tl.where(is_short, short_split, long_split)
    num_row_blocks = tl.where(used, (num_rows + block_rows - 1) // block_rows, 0)
    num_planes = (tl.load(in_features + site) + split_inputs - 1) // split_inputs
    head = records + tl.where(used, entry, 0) * WORDS
    block_ranks = tl.where(is_short, short_ranks, long_ranks)
    num_band_parts = _count_parts(records, head, used, block_ranks, MAX_RUNS)
    block_outputs = tl.where(is_short, short_outputs, long_outputs)
    num_strip_parts = _count_parts(records, head + 2, used, block_outputs, MAX_RUNS)
    place = ends + site * MAX_RUNS + i
    tl.store(place, tl.cumsum(num_row_blocks * num_band_parts * num_planes, axis=0))
    tl.store(place + num_sites * MAX_RUNS, tl.cumsum(num_row_blocks * num_strip_parts, axis=0))


@triton.jit
def _count_parts(records, lists, used, block, MAX_RUNS: tl.constexpr):
    """Blocks of all bands, or of all strips, of each run's entry; `lists` points at (first,
    number), and word 1 of a band or strip is its length."""
    first = tl.load(lists, mask=used, other=0)
    number = tl.load(lists + 1, mask=used, other=0).to(tl.int32)
    num_parts = tl.zeros((MAX_RUNS,), tl.int32)
    for n in range(tl.max(number, axis=0)):
        length = tl.load(records + (first + n) * WORDS + 1, mask=n < number, other=0).to(tl.int32)
        num_parts += (length + block - 1) // block
    return num_parts


@triton.jit
def find_part(part, item, BLOCK: tl.constexpr):
    """The band or strip, from `item` on, that the part-th block lies in, and the block's number in
    it."""
    num_blocks = (tl.load(item + 1).to(tl.int32) + BLOCK - 1) // BLOCK
    while part >= num_blocks:
        part -= num_blocks
        item += WORDS
        num_blocks = (tl.load(item + 1).to(tl.int32) + BLOCK - 1) // BLOCK
    return part, item


@triton.jit
def find_run(run_ends, item):
    """The run that an item belongs to, the item's number in it, and the run's number of items."""
    is_before = run_ends <= item
    run = tl.sum(is_before.to(tl.int32), axis=0)
    begin = tl.max(tl.where(is_before, run_ends, 0), axis=0)
    end = tl.min(tl.where(is_before, 2147483647, run_ends), axis=0)
    return run, item - begin, end - begin


@triton.jit
def row_ids(runs, run, row_block, BLOCK_ROWS: tl.constexpr):
    begin = tl.load(runs + run * RUN_WORDS + 1)
    end = tl.load(runs + run * RUN_WORDS + 2)
    rows = begin + row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return rows.to(tl.int64), rows < end


@triton.jit
def num_rows_of(runs, run):
    return tl.load(runs + run * RUN_WORDS + 2) - tl.load(runs + run * RUN_WORDS + 1)


@triton.jit
def entry_of(runs, run, index, records, site, num_sites):
    slot = tl.load(runs + run * RUN_WORDS).to(tl.int64)
    return records + tl.load(index + slot * num_sites + site).to(tl.int64) * WORDS
