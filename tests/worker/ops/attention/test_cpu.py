"""C++ attention against the plain torch backend: pages, chunks, windows, caps, odd head widths."""

import random

import pytest
import torch

from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer
from loraplex_services.worker.cache.kv_layout import TOKENS_PER_BLOCK, plan_kv_groups
from loraplex_services.worker.ops.attention.cpu import NativeAttention, NativeAttentionMetadata
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.attention.torch import VanillaAttention, VanillaAttentionMetadata
from loraplex_services.worker.types.model_config import KvHeads
from loraplex_services.worker.types.request import RELEASED_BLOCK
from tests.worker.native.isas import ISAS, native
from tests.worker.ops.attention.paged import paged_metadata

NUM_BLOCKS = 48
LENGTHS = (1, 15, 17, 40, 63)


@pytest.fixture(params=ISAS)
def library(request):
    return native(request.param)


class Side:
    """One backend with a cache of its own, poisoned wherever nothing was written."""

    def __init__(self, backend, metadata_class, heads, head_dim, window, dtype, kept, **fields):
        codes = KV_CODES.get(kept)
        sizes = (dtype.itemsize, 0) if codes is None else (1, 2)
        groups = plan_kv_groups(
            [window], [KvHeads(heads[1], head_dim)], sizes[0], scale_bytes=sizes[1]
        )
        arena = ArenaBuffer(NUM_BLOCKS, groups.block_bytes, torch.device("cpu"))
        arena.data.fill_(0xFF)
        self.kv = KvBuffer(arena, groups, dtype, codes)
        self.backend, self.metadata_class, self.fields = backend, metadata_class, fields

    def step(self, q, k, v, lens, starts, tables):
        metadata = paged_metadata(self.metadata_class, self.kv, lens, starts, tables, **self.fields)
        return self.backend.forward(q, k, v, metadata)

    def poison(self, block):
        self.kv.arena.data[block] = 0xFF


def both_sides(
    library, heads, head_dim, window, softcap, dtype, sinks=None, chunked=False, kept="auto"
):
    scale = head_dim**-0.5
    head_shape = HeadShape(heads[0], heads[1], head_dim, scale, softcap, window, chunked)
    shape = (heads, head_dim, window, dtype, kept)
    vanilla = VanillaAttention.for_heads(0, head_shape, sinks)
    compiled = NativeAttention.for_heads(0, head_shape, sinks, native=library)
    return (
        Side(vanilla, VanillaAttentionMetadata, *shape),
        Side(compiled, NativeAttentionMetadata, *shape, task_queries=library.task_queries),
    )


@pytest.mark.parametrize("window", [None, 1, 5, 16, 33])
@pytest.mark.parametrize(("heads", "head_dim"), [((1, 1), 8), ((6, 2), 24), ((9, 3), 64)], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_chunks_and_decodes_in_pages_equal_vanilla(library, window, heads, head_dim, softcap):
    check(library, heads, head_dim, window, softcap, torch.float32, 1e-5)


@pytest.mark.parametrize("head_dim", [1, 7, 80, 128, 200])
def test_odd_head_widths_equal_vanilla(library, head_dim):
    check(library, (4, 2), head_dim, None, None, torch.float32, 1e-5)


@pytest.mark.parametrize("window", [None, 5, 33])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((9, 3), 64), ((4, 4), 32), ((34, 2), 96), ((8, 1), 128), ((2, 1), 40)],
    ids=str,
)
def test_bfloat16_equals_vanilla(library, heads, head_dim, window, softcap):
    check(library, heads, head_dim, window, softcap, torch.bfloat16, 2e-2)


@pytest.mark.parametrize("window", [None, 5, 33])
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "tolerance"),
    [
        ((6, 2), 24, torch.float32, 1e-5),
        ((9, 3), 64, torch.float32, 1e-5),
        ((8, 2), 64, torch.bfloat16, 2e-2),
        ((34, 2), 96, torch.bfloat16, 2e-2),
    ],
    ids=str,
)
def test_sinks_take_their_share_as_in_vanilla(library, heads, head_dim, dtype, tolerance, window):
    # From far below all scores to far above them.
    sinks = torch.linspace(-30.0, 12.0, heads[0])
    check(library, heads, head_dim, window, None, dtype, tolerance, sinks)


@pytest.mark.parametrize("window", [1, 5, 16, 33])
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "tolerance"),
    [((6, 2), 24, torch.float32, 1e-5), ((8, 2), 64, torch.bfloat16, 2e-2)],
    ids=str,
)
def test_windows_in_chunks_equal_vanilla(library, heads, head_dim, dtype, tolerance, window):
    check(library, heads, head_dim, window, None, dtype, tolerance, chunked=True)


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("window", [None, 5, 33])
@pytest.mark.parametrize(
    ("heads", "head_dim", "softcap"),
    [((9, 3), 64, None), ((4, 4), 32, 2.0), ((34, 2), 96, None), ((8, 1), 256, None)],
    ids=str,
)
def test_codes_equal_vanilla_in_bfloat16(library, heads, head_dim, softcap, window, kept):
    sinks = torch.linspace(-3.0, 3.0, heads[0])
    check(library, heads, head_dim, window, softcap, torch.bfloat16, 2e-2, sinks, kept=kept)


def check(
    library,
    heads,
    head_dim,
    window,
    softcap,
    dtype,
    tolerance,
    sinks=None,
    chunked=False,
    kept="auto",
):
    rng = random.Random(f"{window}{heads}")
    torch.manual_seed(0)
    sides = both_sides(library, heads, head_dim, window, softcap, dtype, sinks, chunked, kept)
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(-(-n // TOKENS_PER_BLOCK))] for n in LENGTHS]
    done = [0] * len(LENGTHS)
    q_size, kv_size = heads[0] * head_dim, heads[1] * head_dim
    while active := [i for i, n in enumerate(LENGTHS) if done[i] < n]:
        chosen = rng.sample(active, rng.randrange(1, len(active) + 1))
        chunks = [(min(rng.choice([1, 1, 7, 20]), LENGTHS[i] - done[i]), i) for i in chosen]
        chunks.sort(key=lambda piece: piece[0] == 1)
        lens, order = [num for num, _ in chunks], [i for _, i in chunks]
        qkv = torch.randn(sum(lens), q_size + 2 * kv_size).to(dtype)
        q, k, v = qkv.split((q_size, kv_size, kv_size), dim=-1)
        starts, blocks = [done[i] for i in order], [tables[i] for i in order]
        expected, actual = (side.step(q, k, v, lens, starts, blocks) for side in sides)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        for num, i in chunks:
            done[i] += num
            release_behind(sides, tables[i], done[i], window, free)


def release_behind(sides, table, num_done, window, free):
    """Give blocks behind the window back, poisoned."""
    first = 0 if window is None else max(0, num_done - window + 1) // TOKENS_PER_BLOCK
    for index, block in enumerate(table[:first]):
        if block != RELEASED_BLOCK:
            for side in sides:
                side.poison(block)
            free.append(block)
            table[index] = RELEASED_BLOCK


BITS = [
    (torch.float32, 24, "auto"),
    (torch.bfloat16, 64, "auto"),
    (torch.bfloat16, 64, "int8"),
    (torch.bfloat16, 64, "fp8"),
]


@pytest.mark.parametrize(("dtype", "dim", "kept"), BITS, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_a_prompt_gives_the_same_bits_however_it_is_cut(library, window, dtype, dim, kept):
    torch.manual_seed(1)
    qkv = torch.randn(200, 8 * dim).to(dtype)
    q, k, v = qkv.split((4 * dim, 2 * dim, 2 * dim), dim=-1)
    table = random.Random(0).sample(range(NUM_BLOCKS), 13)
    results = []
    for chunk in (200, 7, 1):
        _, side = both_sides(library, (4, 2), dim, window, None, dtype, kept=kept)
        out = []
        for begin in range(0, 200, chunk):
            rows = slice(begin, min(begin + chunk, 200))
            lens = [rows.stop - begin]
            out.append(side.step(q[rows], k[rows], v[rows], lens, [begin], [table]))
        results.append(torch.cat(out))
    assert results[0].equal(results[1])
    assert results[0].equal(results[2])


@pytest.mark.parametrize(("dtype", "dim", "kept"), BITS, ids=str)
def test_a_sequence_gives_the_same_bits_whatever_its_neighbours(library, dtype, dim, kept):
    torch.manual_seed(1)
    lens = [3, 150, 40, 1]
    qkv = torch.randn(sum(lens), 8 * dim).to(dtype)
    q, k, v = qkv.split((4 * dim, 2 * dim, 2 * dim), dim=-1)
    tables = [[0], list(range(1, 11)), [11, 12, 13], [14]]
    _, side = both_sides(library, (4, 2), dim, None, None, dtype, kept=kept)
    together = side.step(q, k, v, lens, [0] * 4, tables).split(lens)
    _, side = both_sides(library, (4, 2), dim, None, None, dtype, kept=kept)
    for i, (own, *parts) in enumerate(
        zip(together, *(x.split(lens) for x in (q, k, v)), strict=True)
    ):
        assert own.equal(side.step(*parts, [lens[i]], [0], [tables[i]])), i
