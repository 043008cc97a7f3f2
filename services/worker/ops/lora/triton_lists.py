"""The Triton program that lists a step's groups, and what programs share that read groups.

`device_records.py` describes the words of records, and README.md the lists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex_services.worker.ops.lora import device_records as host
from loraplex_services.worker.ops.lora import launch_plan

WORDS = tl.constexpr(host.RECORD_WORDS)
INDEX_WORDS = tl.constexpr(host.INDEX_WORDS)
GROUP_ROWS = tl.constexpr(host.GROUP_ROWS)
NO_ROW = tl.constexpr(host.ABSENT)
A_WORD, B_WORD = tl.constexpr(host.A_WORD), tl.constexpr(host.B_WORD)
STRIDES_WORD, SIZE_WORD = tl.constexpr(host.STRIDES_WORD), tl.constexpr(host.SIZE_WORD)
INPUTS_WORD, OUTPUTS_WORD = tl.constexpr(host.INPUTS_WORD), tl.constexpr(host.OUTPUTS_WORD)
SCALES_WORD = tl.constexpr(host.SCALES_WORD)
GAIN_WORD, BIAS_WORD = tl.constexpr(host.GAIN_WORD), tl.constexpr(host.BIAS_WORD)
LORA_BIAS_WORD = tl.constexpr(host.LORA_BIAS_WORD)
COLUMNS_WORD = tl.constexpr(host.COLUMNS_WORD)
ROWS_WORD = tl.constexpr(1)
"""Of a listed group: its token rows [begin, end), in place of B_WORD."""
VECTOR_ROWS_WORD, COEF_WORD = tl.constexpr(0), tl.constexpr(5)
"""Of a listed vector: its token rows [begin, end), and the bits of its run's coefficient."""
RUN_WORDS = tl.constexpr(4)
TILE_ROWS = tl.constexpr(launch_plan.TILE_ROWS)
TILE_NUMBERS = tl.constexpr(launch_plan.TILE_ROWS * host.GROUP_ROWS)


@triton.jit
def low_word(word):
    """The low 32 bits of int64 words, where they are a number of at most 31."""
    return (word & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def high_word(word):
    """The high 32 bits of int64 words."""
    return (word >> 32).to(tl.int32)


@triton.jit
def aligned(value, ALIGN: tl.constexpr):
    """The value, a multiple of ALIGN, in a form from which the compiler sees that it is one. (It
    forgets `tl.multiple_of` at calls and in loops.)"""
    return value // ALIGN * ALIGN


@triton.jit
def choose(number, value_0, value_1, value_2, value_3):
    """The value with the index `number`, 0 to 3."""
    late = tl.where(number == 2, value_2, value_3)
    return tl.where(number == 0, value_0, tl.where(number == 1, value_1, late))


@triton.jit(
    do_not_specialize=[
        "first_part", "num_parts", "max_groups", "max_tiles", "num_tiles", "max_vectors"
    ]
)  # fmt: skip
def list_groups(
    runs, index, records, entries, lanes, counts, tile_ends, vectors, done,
    first_part, num_parts, max_groups, max_tiles, num_tiles, max_vectors,
    MAX_RUNS: tl.constexpr,
):  # fmt: skip
    """List the groups of every part for the runs of a step. Grid: one program for each part.

    Writes, for part p counted from `first_part`: its groups in the order of the runs to
    `entries [p, g]`, the positions of their rows of B to `lanes [p, 16 g + r]`, their number to
    `counts [p, 0]` and that of its vectors to `counts [p, 1]`, the number of groups of the row
    tiles 0..t to `tile_ends [p, t]`. Clears `done [p]`.
    """
    part = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, MAX_RUNS)
    slot = tl.load(runs + i * RUN_WORDS).to(tl.int64)
    begin = tl.load(runs + i * RUN_WORDS + 1)
    end = tl.load(runs + i * RUN_WORDS + 2)
    coef = tl.load(runs + i * RUN_WORDS + 3).to(tl.float32, bitcast=True)
    is_run = begin < end
    of_slot = index + (slot * num_parts + first_part + part) * INDEX_WORDS
    first = tl.load(of_slot, mask=is_run, other=0).to(tl.int64)
    count = tl.load(of_slot + 1, mask=is_run, other=0)
    offset = tl.cumsum(count, axis=0) - count
    tl.store(counts + part * 2, tl.sum(count, axis=0))
    rows = begin.to(tl.int64) | (end.to(tl.int64) << 32)
    r = tl.arange(0, GROUP_ROWS)
    for g in range(tl.max(count, axis=0)):
        is_group = g < count
        record = records + (first + g) * WORDS
        entry_number = part * max_groups + offset + g
        entry = entries + entry_number * WORDS
        b_offset = tl.load(record + B_WORD, mask=is_group, other=0)
        strides = tl.load(record + STRIDES_WORD, mask=is_group, other=0)
        size = tl.load(record + SIZE_WORD, mask=is_group, other=0)
        factor = coef * high_word(size).to(tl.float32, bitcast=True)
        bits = factor.to(tl.int32, bitcast=True).to(tl.int64)
        _copy_word(entry, record, A_WORD, is_group)
        tl.store(entry + ROWS_WORD, rows, mask=is_group)
        tl.store(entry + STRIDES_WORD, strides, mask=is_group)
        _copy_word(entry, record, INPUTS_WORD, is_group)
        _copy_word(entry, record, OUTPUTS_WORD, is_group)
        tl.store(entry + SIZE_WORD, low_word(size).to(tl.int64) | (bits << 32), mask=is_group)
        _copy_word(entry, record, SCALES_WORD, is_group)
        row_of_b = b_offset[:, None] + r[None, :] * high_word(strides)[:, None].to(tl.int64)
        row_of_b = tl.where(r[None, :] < low_word(size)[:, None], row_of_b, NO_ROW)
        lane = entry_number[:, None] * GROUP_ROWS + r[None, :]
        tl.store(lanes + lane, row_of_b, mask=is_group[:, None])
    for t in range(num_tiles):
        in_tiles = tl.sum(tl.where(begin < (t + 1) * TILE_ROWS, count, 0), axis=0)
        tl.store(tile_ends + part * max_tiles + t, in_tiles)
    tl.store(done + part, 0)
    num_vectors = _list_vectors(
        vectors + part * max_vectors * WORDS, records, of_slot + 2, is_run, rows, coef
    )
    tl.store(counts + part * 2 + 1, num_vectors)


@triton.jit
def _list_vectors(vectors, records, entry, is_run, rows, coef):
    """List the vectors of a part for the runs, with their token rows and coefficients; returns
    their number. `entry` is where each run's (first vector, number) is."""
    first = tl.load(entry, mask=is_run, other=0).to(tl.int64)
    count = tl.load(entry + 1, mask=is_run, other=0)
    offset = tl.cumsum(count, axis=0) - count
    for v in range(tl.max(count, axis=0)):
        is_vector = v < count
        record = records + (first + v) * WORDS
        vector = vectors + (offset + v) * WORDS
        tl.store(vector + VECTOR_ROWS_WORD, rows, mask=is_vector)
        _copy_word(vector, record, COLUMNS_WORD, is_vector)
        _copy_word(vector, record, GAIN_WORD, is_vector)
        _copy_word(vector, record, LORA_BIAS_WORD, is_vector)
        _copy_word(vector, record, BIAS_WORD, is_vector)
        bits = coef.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(vector + COEF_WORD, bits, mask=is_vector)
    return tl.sum(count, axis=0)


@triton.jit
def _copy_word(to, record, word: tl.constexpr, mask):
    """Copy one word of some records."""
    tl.store(to + word, tl.load(record + word, mask=mask, other=0), mask=mask)


@triton.jit
def as_pair(values, DTYPE: tl.constexpr):
    """Float32 values as two numbers of half precision whose sum they are, so that they are not
    rounded to one. In float32, the first number is the value, and nothing reads the second."""
    high = values.to(DTYPE)
    low = high
    if DTYPE != tl.float32:
        rounded = high.to(tl.float32)
        low = tl.where(tl.abs(rounded) == float("inf"), 0.0, values - rounded).to(DTYPE)
    return high, low


@triton.jit
def add_product(total, x, w, WIDEN: tl.constexpr):
    """total + x w, where w may be narrower than x."""
    if WIDEN:
        x = x.to(tl.float32)
    return tl.dot(x, w.to(x.dtype), total, input_precision="ieee")
