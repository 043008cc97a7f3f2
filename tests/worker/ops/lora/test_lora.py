"""The fast paths against the reference: odd shapes, named adapter mixes, poisoned outputs."""

import contextlib
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from loraplex_services.worker.ops.lora import reference
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.cpu import NativeLora
from loraplex_services.worker.ops.lora.cpu_records import Records
from loraplex_services.worker.ops.lora.runs import RowRun, row_runs
from loraplex_services.worker.ops.lora.tables import SiteDelta, Slice, Tile
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from tests.worker.native.isas import ISAS, PAIRED, native_choosing

SITE, NUM_SITES = 3, 5
NUM_ADAPTERS = 7
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
SHAPES = [(1, 1, 1), (7, 33, 5), (31, 65, 130), (64, 100, 257)]
MIXES = ["distinct", "uniform", "zipf", "identical", "skewed", "none", "half-base"]


@contextlib.contextmanager
def update_of(path):
    """`add_lora` of torch or of a library, in bfloat16 with vectors of float32 or in pairs."""
    if path == "torch":
        yield portable.add_lora
        return
    with native_choosing(path) as library:
        yield NativeLora(library).add_lora


@pytest.fixture(params=["torch", *ISAS, *PAIRED])
def fast(request):
    with update_of(request.param) as add_lora:
        yield add_lora


@pytest.fixture(params=[*ISAS, *PAIRED])
def compiled(request):
    with update_of(request.param) as add_lora:
        yield add_lora


def batch_of(runs, table) -> LoraBatch:
    return LoraBatch(tuple(runs), table, Records(table, NUM_SITES))


def inside_of_nan(values: torch.Tensor) -> torch.Tensor:
    """The same matrix as a view of a larger one full of NaN."""
    rows, columns = values.shape
    around = torch.full((rows + 2, columns + 24), float("nan"), dtype=values.dtype)
    around[1:-1, 8:-16] = values
    return around[1:-1, 8:-16]


def slots_of_mix(mix: str, num_rows: int, rng: random.Random) -> list[int | None]:
    """Slot of each row; None = base."""
    zipf = [1 / (i + 1) ** 1.5 for i in range(NUM_ADAPTERS)]
    return {
        "distinct": lambda: [i % NUM_ADAPTERS for i in range(num_rows)],
        "uniform": lambda: [rng.randrange(NUM_ADAPTERS) for _ in range(num_rows)],
        "zipf": lambda: rng.choices(range(NUM_ADAPTERS), zipf, k=num_rows),
        "identical": lambda: [2] * num_rows,
        "skewed": lambda: [0 if i else 5 for i in range(num_rows)],
        "none": lambda: [None] * num_rows,
        "half-base": lambda: [rng.choice([None, 1, 4]) for _ in range(num_rows)],
    }[mix]()


def random_tiles(rng, rows, columns, row_begin, col_begin, dtype) -> list[Tile]:
    """A matrix cut at random places, as block edges cut it."""
    tiles = []
    cut = rng.randrange(1, columns + 1)
    for begin, end in [(0, cut), (cut, columns)]:
        row = 0
        while begin < end and row < rows:
            num = rng.randrange(1, min(rng.choice([16, 80]), rows - row) + 1)
            data = torch.randn(num, end - begin).to(dtype) / math.sqrt(columns)
            rectangle = row_begin + row, row_begin + row + num, col_begin + begin, col_begin + end
            tiles.append(Tile(*rectangle, data))
            row += num
    return tiles


def random_delta(rng, num_inputs, num_outputs, dtype) -> SiteDelta:
    """Up to three slices of different ranks; absent outputs and gains."""
    cuts = sorted({0, rng.randrange(num_outputs + 1), rng.randrange(num_outputs + 1), num_outputs})
    slices, a, b, gains, rank = [], [], [], [], 0
    vectors = [], []
    for begin, end in itertools.pairwise(cuts):
        if rng.random() < 0.25 and slices:
            continue
        num_ranks, scale = rng.choice([1, 3, 16, 17, 64, 80]), rng.choice([0.25, 1.0, 2.0])
        slices.append(Slice(rank, num_ranks, begin, end - begin, scale))
        a += random_tiles(rng, num_ranks, num_inputs, rank, 0, dtype)
        b += random_tiles(rng, num_ranks, end - begin, rank, begin, dtype)
        if rng.random() < 0.3:
            gains.append(Tile(0, 1, begin, end, torch.rand(1, end - begin) + 0.5))
        for tiles in vectors:
            if rng.random() < 0.3:
                tiles.append(Tile(0, 1, begin, end, torch.randn(1, end - begin)))
        rank += num_ranks
    scales = torch.cat([torch.full((part.rank_len,), part.scale) for part in slices])
    lora_biases, biases = map(tuple, vectors)
    return SiteDelta(tuple(slices), tuple(a), tuple(b), scales, lora_biases, tuple(gains), biases)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-I{s[1]}-O{s[2]}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fast_path_equals_the_naive_truth(fast, mix, shape, dtype):
    compare_with_naive(fast, mix, shape, dtype, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-I{s[1]}-O{s[2]}")
def test_torch_equals_the_naive_truth_in_float16_too(mix, shape):
    half = torch.float16
    compare_with_naive(portable.add_lora, mix, shape, half, half, TOLERANCE[half])


@pytest.mark.parametrize("mix", ["identical", "zipf"])
def test_outputs_that_no_task_keeps_at_the_same_time_equal_the_naive_truth(fast, mix):
    half = torch.bfloat16
    compare_with_naive(fast, mix, (190, 40, 300), half, half, TOLERANCE[half])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-I{s[1]}-O{s[2]}")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_tiles_widen_exactly_under_float32_rows(fast, shape, stored):
    compare_with_naive(fast, "uniform", shape, torch.float32, stored, TOLERANCE[torch.float32])


def compare_with_naive(fast, mix, shape, dtype, stored, tolerance):
    num_rows, num_inputs, num_outputs = shape
    rng = random.Random(f"{mix}{shape}")
    torch.manual_seed(rng.randrange(1 << 30))
    slots = slots_of_mix(mix, num_rows, rng)
    slots.sort(key=lambda slot: (slot is None, slot or 0))
    table = {(s, SITE): random_delta(rng, num_inputs, num_outputs, stored) for s in range(6)}
    lora = batch_of(row_runs((1, [] if slot is None else [(slot, 0.5)]) for slot in slots), table)
    x = inside_of_nan(torch.randn(num_rows, num_inputs).to(dtype))
    base = torch.randn(num_rows, num_outputs).to(dtype)
    expected, actual = base.clone(), inside_of_nan(base)
    reference.add_lora(expected, x, SITE, lora)
    fast(actual, x, SITE, lora)
    assert not expected.isnan().any()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)
    assert actual._base.isnan().sum() == actual._base.numel() - actual.numel()


def as_integers(tiles):
    return tuple(
        tile._replace(data=torch.randint(-127, 128, tile.data.shape, dtype=torch.int8))
        for tile in tiles
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_are_widened_and_scaled_by_rank_row(fast, dtype):
    rng = random.Random(12)
    torch.manual_seed(12)
    delta = random_delta(rng, 33, 41, dtype)
    factors = torch.rand(delta.rank) / 127**2
    delta = replace(delta, a=as_integers(delta.a), b=as_integers(delta.b), scales=factors)
    batch = batch_of([RowRun(1, 0.5, 0, 3)], {(1, SITE): delta})
    x, base = torch.randn(4, 33).to(dtype), torch.randn(4, 41).to(dtype)
    expected, actual = base.clone(), base.clone()
    reference.add_lora(expected, x, SITE, batch)
    fast(actual, x, SITE, batch)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit(compiled, dtype):
    rng = random.Random(4)
    torch.manual_seed(4)
    table = {(s, SITE): random_delta(rng, 100, 75, dtype) for s in range(3)}
    runs = [RowRun(0, 1.0, 0, 1), RowRun(1, 0.5, 1, 24), RowRun(2, 1.0, 24, 27)]
    x, y = torch.randn(30, 100).to(dtype), torch.randn(30, 75).to(dtype)
    together = y.clone()
    compiled(together, x, SITE, batch_of(runs, table))
    for run in runs:
        for row in range(run.begin, run.end):
            alone = y[row : row + 1].clone()
            runs_alone = [RowRun(run.slot, run.coef, 0, 1)]
            compiled(alone, x[row : row + 1], SITE, batch_of(runs_alone, table))
            assert alone.equal(together[row : row + 1])


@pytest.mark.parametrize("smallest", [0, 28], ids=["ordinary", "tiny"])
def test_a_row_has_the_same_bits_in_runs_of_any_length(compiled, smallest):
    rng = random.Random(5)
    torch.manual_seed(5)
    lengths = [1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 48, 60, 64, 97]
    ends = list(itertools.accumulate(lengths))
    deltas = [random_delta(rng, 200, 330, torch.bfloat16) for _ in lengths]
    deltas = [replace(delta, lora_biases=(), biases=()) for delta in deltas]
    table = {(slot, SITE): delta for slot, delta in enumerate(deltas)}
    # Products of tiny numbers, their sums, or both are too small for the usual precision.
    sizes = 10.0 ** -(smallest + torch.arange(float(ends[-1])) % 12)[:, None]
    x = (torch.randn(ends[-1], 200) * sizes).bfloat16()
    y = (torch.randn(ends[-1], 330) * sizes / 100).bfloat16()
    begins = [0, *ends[:-1]]
    runs = [RowRun(slot, 0.5, *run) for slot, run in enumerate(zip(begins, ends, strict=True))]
    together = y.clone()
    compiled(together, x, SITE, batch_of(runs, table))
    assert not together.equal(y)
    for run in runs:
        for row in range(run.begin, run.end):
            alone = y[row : row + 1].clone()
            own = batch_of([RowRun(run.slot, run.coef, 0, 1)], table)
            compiled(alone, x[row : row + 1], SITE, own)
            assert alone.view(torch.int16).equal(together[row : row + 1].view(torch.int16)), run


def test_rows_outside_of_every_run_are_not_touched(fast):
    rng = random.Random(1)
    table = {(0, SITE): random_delta(rng, 8, 8, torch.float32)}
    y = torch.full((4, 8), float("nan"))
    y[1:3] = 0.0
    x = torch.full((4, 8), float("nan"))
    x[1:3] = 1.0
    fast(y, x, SITE, batch_of([RowRun(0, 1.0, 1, 3)], table))
    assert y[[0, 3]].isnan().all()
    assert not y[1:3].isnan().any()


@pytest.mark.parametrize("site", [SITE + 1, SITE - 1, NUM_SITES + 1])
def test_a_site_that_the_adapter_leaves_alone_stays_as_it_is(fast, site):
    rng = random.Random(2)
    table = {(0, SITE): random_delta(rng, 8, 8, torch.float32)}
    y = torch.ones(2, 8)
    fast(y, torch.ones(2, 8), site, batch_of([RowRun(0, 1.0, 0, 2)], table))
    assert y.equal(torch.ones(2, 8))


def test_several_adapters_of_a_row_add_up(fast):
    rng = random.Random(3)
    deltas = [random_delta(rng, 8, 8, torch.float32) for _ in range(2)]
    deltas = [SiteDelta(d.slices, d.a, d.b, d.scales) for d in deltas]
    table = {(slot, SITE): delta for slot, delta in enumerate(deltas)}
    x = torch.randn(3, 8)
    both, first, second = (torch.zeros(3, 8) for _ in range(3))
    fast(both, x, SITE, batch_of(row_runs([(3, [(0, 0.5), (1, -2.0)])]), table))
    fast(first, x, SITE, batch_of([RowRun(0, 0.5, 0, 3)], table))
    fast(second, x, SITE, batch_of([RowRun(1, -2.0, 0, 3)], table))
    torch.testing.assert_close(both, first + second)


def test_runs_that_overlap_in_part_equal_the_naive_truth(fast):
    rng = random.Random(5)
    table = {(slot, SITE): random_delta(rng, 20, 30, torch.float32) for slot in range(3)}
    runs = [RowRun(0, 1.0, 0, 40), RowRun(1, 0.5, 7, 22), RowRun(2, 2.0, 20, 41)]
    table = {k: SiteDelta(d.slices, d.a, d.b, d.scales) for k, d in table.items()}
    x, expected = torch.randn(45, 20), torch.randn(45, 30)
    actual = expected.clone()
    reference.add_lora(expected, x, SITE, batch_of(runs, table))
    fast(actual, x, SITE, batch_of(runs, table))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_a_forgotten_slot_is_read_anew():
    rng = random.Random(6)
    table = {(0, SITE): random_delta(rng, 8, 8, torch.float32)}
    records = Records(table, NUM_SITES)
    before = records.address(0)
    assert records.address(0) == before
    kept = records._records[0]
    records.forget(0)
    table.clear()
    records.address(0)
    assert not records._records[0].equal(kept)


def test_neighbours_with_the_same_adapter_share_a_run():
    rows = [(5, [(4, 1.0)]), (2, [(4, 1.0)]), (1, [(9, 1.0)]), (3, []), (1, [(4, 1.0)])]
    assert row_runs(rows) == (
        RowRun(4, 1.0, 0, 7),
        RowRun(9, 1.0, 7, 8),
        RowRun(4, 1.0, 11, 12),
    )


def test_rows_that_combine_adapters_have_their_runs_in_the_order_of_the_request():
    both = [(2, 1.0), (1, 0.5)]
    rows = [(1, [(1, 0.5)]), (1, both), (3, both), (1, [(2, 1.0)]), (1, [(2, 0.7)])]
    assert row_runs(rows) == (
        RowRun(1, 0.5, 0, 1),
        RowRun(2, 1.0, 1, 5),
        RowRun(1, 0.5, 1, 5),
        RowRun(2, 1.0, 5, 6),
        RowRun(2, 0.7, 6, 7),
    )


def test_selecting_rows_renumbers_the_runs():
    batch = LoraBatch((RowRun(4, 1.0, 0, 7), RowRun(9, 1.0, 7, 8), RowRun(4, 1.0, 9, 12)), {})
    assert batch.select([2, 6, 8, 9, 11]).runs == (RowRun(4, 1.0, 0, 2), RowRun(4, 1.0, 3, 5))
