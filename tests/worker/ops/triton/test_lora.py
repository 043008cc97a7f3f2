"""Shrink and expand against the reference: odd shapes, named mixes, poisoned workspaces."""

import itertools
import random

import pytest
import torch

from loraplex_services.worker.ops.linear.torch import DenseLinear
from loraplex_services.worker.ops.lora import reference
from loraplex_services.worker.ops.lora import triton as fast
from loraplex_services.worker.ops.lora.device_records import OutputRange
from loraplex_services.worker.ops.lora.device_tables import DeviceTables, SiteShape
from loraplex_services.worker.ops.lora.launch_plan import MAX_FUSED_ROWS, MIN_SPLIT_INPUTS
from loraplex_services.worker.ops.lora.runs import RowRun, row_runs
from loraplex_services.worker.ops.lora.step_work import StepWork, work_size
from loraplex_services.worker.ops.lora.tables import SiteDelta, Slice
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from tests.worker.ops.lora.entering import enter_deltas
from tests.worker.ops.triton.adapters import TOLERANCE, PackedArena, random_delta, slots_of_mix

SITE, NUM_SITES, NUM_ADAPTERS = 1, 3, 3
SHAPES = [(1, 1, 1), (3, 33, 5), (18, 40, 70), (50, 20, 24)]


def site_shapes(num_inputs, num_outputs, cuts=()):
    """Those of a model whose middle site has one part between each two cuts."""
    edges = [0, *cuts, num_outputs]
    parts = tuple(OutputRange(SITE, begin, end - begin) for begin, end in itertools.pairwise(edges))
    return [SiteShape(8, ()), SiteShape(num_inputs, parts), SiteShape(8, ())]


def build(rng, shape, dtype, device, block_bytes, ranks=(1, 3, 16, 17, 64), int8=False, cuts=()):
    """Tables with adapters of random shapes at SITE."""
    _, num_inputs, num_outputs = shape
    arena = PackedArena(400, block_bytes, device, rng)
    deltas = {
        slot: random_delta(rng, arena, num_inputs, num_outputs, dtype, ranks, int8)
        for slot in range(NUM_ADAPTERS)
    }
    shapes = site_shapes(num_inputs, num_outputs, cuts)
    stored = torch.int8 if int8 else dtype
    tables = DeviceTables(arena.data.view(-1), stored, shapes, 8, 4000)
    for slot, delta in deltas.items():
        enter_deltas(tables, slot, {SITE: delta})
    return tables, {(slot, SITE): delta for slot, delta in deltas.items()}


def update(y, x, work):
    fast.launch(None, x, SITE, work)
    fast.launch(y, x, SITE, work)


def apply(y, x, runs, tables):
    work = StepWork(tables, work_size(tables, runs, len(x)))
    work.fill(runs)
    work.list_groups(len(x))
    update(y, x, work)


def check(
    shape, dtype, device, mix, block_bytes=1024, ranks=(1, 3, 16, 17, 64), int8=False, cuts=()
):
    num_rows, num_inputs, num_outputs = shape
    rng = random.Random(f"{mix}{shape}{cuts}")
    torch.manual_seed(rng.randrange(1 << 30))
    tables, table = build(rng, shape, dtype, device, block_bytes, ranks, int8, cuts)
    slots = slots_of_mix(mix, num_rows, NUM_ADAPTERS, rng)
    slots.sort(key=lambda slot: (slot is None, slot or 0))
    runs = row_runs((1, [] if slot is None else [(slot, 0.5)]) for slot in slots)
    x = torch.randn(num_rows, num_inputs, device=device).to(dtype)
    base = torch.randn(num_rows, num_outputs, device=device).to(dtype)
    expected, actual = base.clone(), base.clone()
    reference.add_lora(expected, x, SITE, LoraBatch(runs, table))
    apply(actual, x, runs, tables)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "mix", ["distinct", "uniform", "zipf", "identical", "skewed", "none", "half-base"]
)
def test_named_mixes_equal_the_naive_truth(mix, device):
    check((6, 20, 40), torch.float32, device, mix, ranks=(1, 16, 17))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-I{s[1]}-O{s[2]}")
def test_odd_shapes_equal_the_naive_truth(shape, device):
    check(shape, torch.float32, device, "uniform")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_equals_the_naive_truth(dtype, device):
    check((5, 33, 34), dtype, device, "zipf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_integers_are_widened_and_scaled_by_rank_row(dtype, device):
    check((5, 33, 34), dtype, device, "zipf", ranks=(1, 16, 17), int8=True)


def test_rows_wider_than_a_block_are_read_in_chunks(device):
    check((3, 70, 90), torch.float32, device, "distinct", 128, (1, 5))


def test_rows_that_combine_adapters_add_up(device):
    rng = random.Random(5)
    tables, table = build(rng, (4, 20, 20), torch.float32, device, 1024)
    runs = (RowRun(0, 0.5, 0, 3), RowRun(1, -2.0, 1, 4), RowRun(2, 1.0, 3, 4))
    plain = {key: SiteDelta(d.slices, d.a, d.b, d.scales) for key, d in table.items()}
    for slot in range(NUM_ADAPTERS):
        tables.remove(slot)
        enter_deltas(tables, slot, {SITE: plain[slot, SITE]})
    x, y = torch.randn(4, 20, device=device), torch.zeros(4, 20, device=device)
    expected = y.clone()
    reference.add_lora(expected, x, SITE, LoraBatch(runs, plain))
    apply(y, x, runs, tables)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_rows_outside_of_every_run_and_absent_sites_stay_as_they_are(device):
    tables, _ = build(random.Random(6), (4, 8, 8), torch.float32, device, 1024)
    x = torch.ones(4, 8, device=device)
    y = torch.full((4, 8), float("nan"), device=device)
    y[1:3] = 0.0
    runs = [RowRun(0, 1.0, 1, 3)]
    work = StepWork(tables, work_size(tables, runs, len(x)))
    work.fill(runs)
    work.list_groups(len(x))
    update(y, x, work)
    assert y[[0, 3]].isnan().all()
    assert not y[1:3].isnan().any()
    tables.remove(0)
    before = y.clone()
    work.list_groups(len(x))
    update(y, x, work)
    assert torch.equal(y[1:3], before[1:3])


def test_the_result_does_not_depend_on_the_neighbours_in_the_batch(device):
    tables, _ = build(random.Random(7), (6, 70, 40), torch.float32, device, 1024, (3, 17))
    x = torch.randn(6, 70, device=device)
    alone, together = torch.zeros(1, 40, device=device), torch.zeros(6, 40, device=device)
    apply(alone, x[4:5].contiguous(), [RowRun(1, 1.0, 0, 1)], tables)
    runs = [RowRun(0, 1.0, 0, 4), RowRun(1, 1.0, 4, 5), RowRun(2, 1.0, 5, 6)]
    apply(together, x, runs, tables)
    assert together[4].equal(alone[0])


@pytest.mark.parametrize("cuts", [(24,), (8, 24), (8, 24, 32)], ids=lambda c: f"{len(c) + 1}parts")
def test_groups_of_several_parts_reach_their_own_outputs(cuts, device):
    check((5, 33, 40), torch.float32, device, "distinct", cuts=cuts)


def test_sums_over_several_splits_of_the_inputs_equal_the_naive_truth(device):
    check((5, 2 * MIN_SPLIT_INPUTS + 9, 24), torch.float32, device, "half-base", 1 << 18, (1, 17))


def plain_tables(dtype, device, num_inputs, parts, ranks):
    """An adapter for each rank on every part of one site: its tables, and its deltas."""
    rng = random.Random(3)
    arena = PackedArena(40, 1 << 16, device, rng)
    width = parts[-1].end
    shapes = [SiteShape(8, ()), SiteShape(num_inputs, parts, True, False), SiteShape(8, ())]
    tables = DeviceTables(arena.data.view(-1), dtype, shapes, 8, 4000)
    table = {}
    for slot, rank in enumerate(ranks):
        slices, a, b = [], [], []
        for i, part in enumerate(parts):
            slices.append(Slice(i * rank, rank, part.begin, part.length, 0.5))
            a += arena.put((torch.randn(rank, num_inputs) / num_inputs**0.5).to(dtype), i * rank)
            b += arena.put((torch.randn(rank, part.length) / 4).to(dtype), i * rank, part.begin)
        scales = torch.full((rank * len(parts),), 0.5, device=device)
        table[slot, SITE] = SiteDelta(tuple(slices), tuple(a), tuple(b), scales)
        enter_deltas(tables, slot, {SITE: table[slot, SITE]})
    assert width == sum(part.length for part in parts)
    return tables, table


@pytest.mark.parametrize("num_rows", [1, 2, MAX_FUSED_ROWS])
def test_a_base_product_with_its_update_equals_both_apart(num_rows, device):
    torch.manual_seed(num_rows)
    dtype, num_inputs = torch.float16, 256
    parts = (OutputRange(SITE, 0, 64), OutputRange(SITE, 64, 32), OutputRange(SITE, 96, 32))
    tables, table = plain_tables(dtype, device, num_inputs, parts, (16, 24))
    edge = (num_rows + 1) // 2
    runs = [RowRun(0, 1.5, 0, edge)] + ([RowRun(1, -0.5, edge, num_rows - 1)] * (num_rows > 2))
    x = torch.randn(num_rows, num_inputs, device=device).to(dtype)
    weight = (torch.randn(128, num_inputs, device=device) / 16).to(dtype)
    lora = fast.DeviceLora(tables)
    batch = LoraBatch(tuple(runs), table, None, tables, lora.begin(runs, num_rows))
    assert fast.can_fuse(x, DenseLinear(weight))
    actual = lora.product(DenseLinear(weight), x, SITE, batch)
    expected = x.double() @ weight.double().T
    reference.add_lora(expected, x.double(), SITE, LoraBatch(tuple(runs), table))
    torch.testing.assert_close(actual.double(), expected, rtol=4e-3, atol=4e-3)


def test_an_intermediate_beyond_half_precision_overflows_to_infinity_not_to_nan(device):
    parts = (OutputRange(SITE, 0, 16),)
    tables, table = plain_tables(torch.float16, device, 16, parts, (16,))
    delta = table[0, SITE]
    for tile in (*delta.a, *delta.b):
        tile.data.fill_(100.0)
    x = torch.full((1, 16), 100.0, dtype=torch.float16, device=device)
    y = torch.zeros(1, 16, dtype=torch.float16, device=device)
    apply(y, x, [RowRun(0, 1.0, 0, 1)], tables)
    assert y.isposinf().all()


def bits_below_half_precision(device):
    """Tables with a rank row whose intermediate for ones is 0.5 + 2^-11, and a B of 2."""
    tables, table = plain_tables(torch.bfloat16, device, 16, (OutputRange(SITE, 0, 16),), (1,))
    a, b = table[0, SITE].a[0].data, table[0, SITE].b[0].data
    a.fill_(0.0)
    a[0, 0], a[0, 1] = 1.0, 2.0**-10
    b.fill_(2.0)
    return tables


def test_the_intermediate_is_not_rounded_to_half_precision(device):
    tables = bits_below_half_precision(device)
    x, y = (torch.full((1, 16), value, device=device).bfloat16() for value in (1.0, -1.0))
    apply(y, x, [RowRun(0, 1.0, 0, 1)], tables)
    assert (y == 2.0**-10).all()
