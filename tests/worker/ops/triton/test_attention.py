"""Paged attention by kernels against the reference over each whole sequence."""

import random
from dataclasses import dataclass

import pytest
import torch

from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer
from loraplex_services.worker.cache.kv_layout import TOKENS_PER_BLOCK, plan_kv_groups
from loraplex_services.worker.ops.attention import shapes, work_items
from loraplex_services.worker.ops.attention.reference import attention
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.attention.triton import context_tiles
from loraplex_services.worker.ops.attention.triton_backend import (
    TritonAttention,
    TritonAttentionMetadata,
    triton_attention,
)
from loraplex_services.worker.ops.attention.workspace import Workspace
from loraplex_services.worker.types.model_config import KvHeads
from loraplex_services.worker.types.request import RELEASED_BLOCK
from tests.worker.ops.attention.paged import paged_metadata
from tests.worker.ops.triton.conftest import INTERPRETING

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Sequence:
    """All queries, keys and values of a sequence, of which the cache holds the first `start`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: list[int]
    start: int

    def fill(self, kv):
        """Put the first keys and values into the cache."""
        for plane, values in zip(kv.planes(0), (self.k, self.v), strict=True):
            for begin in range(0, self.start, TOKENS_PER_BLOCK):
                part = values[begin : min(begin + TOKENS_PER_BLOCK, self.start)]
                plane[self.table[begin // TOKENS_PER_BLOCK], :, : len(part)] = part.transpose(0, 1)

    def release(self, window):
        """Give up the blocks behind the window."""
        for i in range(max(0, self.start - window + 1) // TOKENS_PER_BLOCK):
            self.table[i] = RELEASED_BLOCK


def split_keys(num_keys: int, limit: int) -> list[tuple[int, int]]:
    """Ranges [begin, end) of the items of a row, from its first visible key on, as the kernel
    `list_items` computes them."""
    count = work_items.max_splits(num_keys, limit)
    span = max(-(-num_keys // (count * work_items.KEY_STEP)), 1) * work_items.KEY_STEP
    return [(begin, min(begin + span, num_keys)) for begin in range(0, max(num_keys, 1), span)]


def make_step(shape, dtype, device, chunks, seed=0):
    """Sequences with `pieces` = (computed tokens, new tokens) of each, and a cache with NaN where
    nothing was written."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    groups = plan_kv_groups(
        [shape.window], [KvHeads(shape.num_kv_heads, shape.head_dim)], dtype.itemsize
    )
    lens = [start + num for start, num in chunks]
    counts = [-(-num // TOKENS_PER_BLOCK) for num in lens]
    arena = ArenaBuffer(sum(counts) + 2, groups.block_bytes, device)
    arena.data.fill_(0xFF)
    kv = KvBuffer(arena, groups, dtype)
    free = list(range(sum(counts) + 2))
    rng.shuffle(free)
    sequences = []
    for (start, _), num_tokens, count in zip(chunks, lens, counts, strict=True):
        q, k, v = (
            torch.randn(num_tokens, num, shape.head_dim, device=device).to(dtype)
            for num in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        )
        sequences.append(Sequence(q, k, v, [free.pop() for _ in range(count)], start))
        sequences[-1].fill(kv)
        if shape.window is not None:
            sequences[-1].release(shape.window)
    return kv, sequences


def run_step(shape, kv, sequences, workspace=None, sinks=None):
    """Compute what is new in each sequence, contexts first; `[n, Hq, D]` of each."""
    lens = [len(s.q) - s.start for s in sequences]
    starts, tables = [s.start for s in sequences], [s.table for s in sequences]
    device = sequences[0].q.device
    others = {} if workspace is None else {"workspace": workspace}
    metadata = paged_metadata(TritonAttentionMetadata, kv, lens, starts, tables, device, **others)
    metadata.begin_forward()
    q, k, v = (
        torch.cat([getattr(s, name)[s.start :] for s in sequences]).flatten(1) for name in "qkv"
    )
    out = TritonAttention.for_heads(0, shape, sinks).forward(q, k, v, metadata)
    return [part.view(-1, shape.num_heads, shape.head_dim) for part in out.split(lens)]


def check_step(shape, dtype, device, chunks, tolerance=None, sinks=None):
    kv, sequences = make_step(shape, dtype, device, chunks)
    outputs = run_step(shape, kv, sequences, sinks=sinks)
    tolerance = tolerance or TOLERANCE[dtype]
    for sequence, found in zip(sequences, outputs, strict=True):
        expected = attention(
            sequence.q[sequence.start :], sequence.k, sequence.v, shape, sinks=sinks
        )
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def short_items(monkeypatch):
    """Cut sequences that the interpreter computes in half a second into several items."""
    monkeypatch.setattr(work_items, "LARGEST_SPLIT", 256)


@pytest.mark.parametrize(
    "shape,dtype",
    [
        pytest.param(HeadShape(1, 1, 8, 0.4, None, None), torch.float32, marks=pytest.mark.long),
        pytest.param(HeadShape(6, 2, 24, 0.2, 2.0, None), torch.float32, marks=pytest.mark.long),
        pytest.param(HeadShape(6, 2, 24, 0.2, None, 5), torch.float32, marks=pytest.mark.long),
        (HeadShape(3, 3, 8, 0.3, 30.0, 33), torch.float32),
        (HeadShape(4, 1, 32, 0.2, None, None), torch.float16),
        pytest.param(HeadShape(8, 2, 16, 0.25, None, 16), torch.bfloat16, marks=pytest.mark.long),
        (HeadShape(2, 2, 40, 0.15, None, 150), torch.bfloat16),
        pytest.param(HeadShape(8, 1, 512, 1.0, None, None), torch.bfloat16, marks=pytest.mark.long),
        pytest.param(HeadShape(8, 2, 256, 1.0, None, 90), torch.bfloat16, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_contexts_and_generations_in_pages_equal_dense_attention(shape, dtype, device):
    chunks = [(0, 3), (0, 40), (13, 150), (200, 70), (62, 9), (63, 9), (0, 1), (15, 1), (70, 1)]
    check_step(shape, dtype, device, chunks)


@pytest.mark.parametrize(
    "shape,dtype",
    [
        (HeadShape(4, 2, 16, 0.25, None, None), torch.float32),
        (HeadShape(6, 2, 24, 0.2, 20.0, None), torch.float16),
        (HeadShape(4, 1, 64, 0.125, None, 500), torch.bfloat16),
        pytest.param(HeadShape(8, 1, 512, 1.0, None, None), torch.bfloat16, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_generations_of_any_length_equal_dense_attention(shape, dtype, device):
    check_step(shape, dtype, device, [(n - 1, 1) for n in (1, 64, 256, 257, 321, 650, 1500)])


@pytest.mark.parametrize(
    "shape,dtype",
    [
        (HeadShape(6, 2, 24, 0.2, None, None), torch.float32),
        (HeadShape(8, 1, 16, 0.25, None, 100), torch.bfloat16),
    ],
    ids=str,
)
def test_sinks_take_their_share_once_whatever_the_number_of_items(shape, dtype, device):
    sinks = torch.linspace(-40.0, 8.0, shape.num_heads, device=device)
    chunks = [(0, 40), (62, 9), (200, 70), (0, 1), (15, 1), (256, 1), (650, 1)]
    check_step(shape, dtype, device, chunks, sinks=sinks)


@pytest.mark.parametrize("window", [None, 100, 700])
def test_a_chunk_after_a_long_prefix_equals_dense_attention(window, device):
    shape = HeadShape(4, 1, 16, 0.25, None, window)
    check_step(shape, torch.float16, device, [(900, 90), (1999, 2)])


@pytest.mark.skipif(INTERPRETING, reason="takes minutes under the interpreter")
def test_large_steps_equal_dense_attention(device):
    shape = HeadShape(32, 8, 128, 128**-0.5, None, None)
    check_step(shape, torch.bfloat16, device, [(0, 1100), (70, 900), (400, 1)])


def test_scores_that_float32_cannot_exponentiate_are_attended(device):
    for softcap in (None, 50.0):
        shape = HeadShape(2, 1, 16, 40.0, softcap, None)
        check_step(shape, torch.float32, device, [(0, 20), (500, 1)], tolerance=1e-3)


def test_more_items_of_a_row_than_are_joined_at_a_time_equal_dense_attention(device, monkeypatch):
    monkeypatch.setattr(shapes, "MAX_JOINED_SPLITS", 2)
    check_step(HeadShape(4, 2, 16, 0.25, None, None), torch.float32, device, [(5, 1), (700, 1)])


def test_small_heads_unroll_no_long_loop_over_the_items_of_a_row():
    """Which takes minutes to compile."""
    llama, small = HeadShape(32, 8, 128, 0.1, None, None), HeadShape(4, 2, 16, 0.25, None, None)
    assert [shapes.joined_splits(each) for each in (llama, small)] == [8, 16]


def test_a_generation_has_the_same_bits_whatever_else_is_in_its_batch(device):
    shape = HeadShape(4, 2, 16, 0.25, None, None)
    chunks = [(0, 30), (5, 1), (320, 1)]
    kv, sequences = make_step(shape, torch.float16, device, chunks)
    together = run_step(shape, kv, sequences)
    for i in range(1, len(sequences)):
        four_times = run_step(shape, kv, sequences[i : i + 1] * 4)
        assert all(torch.equal(out, together[i]) for out in four_times)


def test_steps_share_a_workspace_and_leave_its_counters_at_zero(device):
    shape = HeadShape(4, 2, 16, 0.25, None, None)
    kv, sequences = make_step(shape, torch.float32, device, [(270, 1), (5, 1), (530, 1)])
    workspace = Workspace()
    first = run_step(shape, kv, sequences, workspace)
    sums = workspace.partial_sums(1, 1, shape, device)
    assert len(sums.num_finished) == 3
    assert not sums.num_finished.any()
    sums.values.fill_(float("nan"))
    again = run_step(shape, kv, sequences, workspace)
    assert workspace.partial_sums(1, 1, shape, device) is sums
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("limit", [64, 512, 1536])
def test_items_cover_all_keys_and_keep_their_limit_while_there_are_few(limit):
    for num_keys in [*range(1, 1500), 4096, 16384, 16385, 20000, 32768, 131072]:
        ranges = split_keys(num_keys, limit)
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == num_keys
        assert all(begin < end for begin, end in ranges)
        assert len(ranges) <= work_items.max_splits(num_keys, limit) <= work_items.MAX_SPLITS
        longest = max(end - begin for begin, end in ranges)
        assert longest <= max(limit, -(-num_keys // work_items.FEW_SPLITS) + 63)
        if num_keys <= work_items.LONG_SPLIT * work_items.MAX_SPLITS:
            assert longest <= max(limit, work_items.LONG_SPLIT)


def test_a_row_has_no_more_items_than_one_that_sees_more_keys():
    """Captured steps have room for the items of rows of the most keys."""
    for limit in (128, 192, 704, 1536):
        counts = [work_items.max_splits(num_keys, limit) for num_keys in range(1, 140_000, 7)]
        assert counts == sorted(counts)


def test_small_batches_are_cut_into_smaller_items(monkeypatch):
    monkeypatch.setattr(work_items, "LARGEST_SPLIT", 1536)
    limits = [work_items.split_limit(rows, 1, torch.device("cpu")) for rows in (1, 2, 3, 300)]
    assert limits == sorted(limits)
    assert limits[0] < limits[-1] == work_items.LARGEST_SPLIT


@pytest.mark.parametrize("window", [None, 300])
def test_the_device_lists_the_items_of_every_row_and_none_for_padding(window, device):
    rng = random.Random(5)
    num_contexts, lens = 3, [rng.choice([1, 200, 900, 40_000]) for _ in range(260)]
    positions = torch.tensor([9] * num_contexts + [num - 1 for num in lens], device=device)
    kv_slots = torch.ones_like(positions)
    padding = {4, 259}
    for row in padding:
        kv_slots[num_contexts + row] = -1
    items = work_items.empty_items(260 * work_items.MAX_SPLITS, device)
    rows = num_contexts, num_contexts + len(lens)
    table_rows = torch.arange(1040, 0, -1, dtype=torch.int32, device=device).view(-1, 4)[:, 1]
    work_items.list_items(items, positions, kv_slots, table_rows, rows, window, limit=512)
    expected = []
    for row, num_keys in enumerate(lens):
        visible = num_keys if window is None else min(num_keys, window)
        ranges = split_keys(0 if row in padding else visible, 512)
        first, hidden = len(expected), num_keys - visible
        for begin, end in ranges:
            keys = hidden + begin, hidden + end
            expected.append([num_contexts + row, 1039 - 4 * row, *keys, first, len(ranges)])
    assert items[0, 0] == len(expected)
    assert items[1 : len(expected) + 1].tolist() == expected


def test_tiles_that_see_the_most_keys_come_first():
    tiles = context_tiles([(0, 5, 0), (5, 7, 100)], block_rows=2)
    assert tiles == [
        [1, 5, 7, 100, 102],
        [0, 4, 5, 4, 5],
        [0, 2, 4, 2, 5],
        [0, 0, 2, 0, 5],
    ]


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_nothing_is_compiled_after_the_warm_up_variants(device):
    from triton import knobs

    shape = HeadShape(8, 2, 64, 0.125, None, None)
    groups = plan_kv_groups([None], [KvHeads(2, 64)], 2)
    kv = KvBuffer(ArenaBuffer(8, groups.block_bytes, device), groups, torch.bfloat16)
    maker, attention = triton_attention(), TritonAttention.for_heads(0, shape)
    for num_tokens in maker.backend.warm_up_sizes:
        metadata = maker.idle_metadata(kv, torch.arange(num_tokens, device=device))
        metadata.begin_forward()
        q = torch.zeros(num_tokens, 512, dtype=torch.bfloat16, device=device)
        k = torch.zeros(num_tokens, 128, dtype=torch.bfloat16, device=device)
        attention.forward(q, k, k, metadata)
    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    try:
        for chunks in ([(0, 1)], [(0, 300), (77, 16)], [(n, 1) for n in range(0, 2000, 7)]):
            check_step(shape, torch.bfloat16, device, chunks)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert compiled == []
