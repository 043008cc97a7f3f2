"""Shrink and expand against the naive truth: odd shapes, named mixes, poisoned workspaces."""

import random
from contextlib import contextmanager

import pytest
import torch

from services.worker.kernels.lora import naive
from services.worker.kernels.lora import torch as portable
from services.worker.kernels.lora import triton as fast
from services.worker.kernels.lora.device_tables import DeviceTables
from services.worker.kernels.lora.plan import LoraPlan, Tiling
from services.worker.kernels.lora.runs import RowRun, disjoint_passes, row_runs
from services.worker.kernels.lora.step_work import StepWork
from services.worker.kernels.lora.tables import SiteDelta
from services.worker.kernels.lora.worklist import LoraBatch
from tests.worker.kernels.triton.adapters import (
    TOLERANCE,
    PackedArena,
    random_delta,
    slots_of_mix,
)

SITE, NUM_SITES, NUM_ADAPTERS = 1, 3, 3
ROW = Tiling(False, 1, 64, 64, 64)
TILE = Tiling(True, 16, 32, 32, 32)
PLANS = {
    "decode": LoraPlan(ROW, TILE, short_max=1),
    "mixed": LoraPlan(TILE, Tiling(True, 32, 64, 1 << 20, 64, 64), short_max=2),
}
SHAPES = [(1, 1, 1), (3, 33, 5), (9, 40, 70)]


def build(rng, shape, dtype, device, block_bytes, ranks=(1, 3, 16, 17, 64), int8=False):
    """Tables with adapters of random shapes at SITE."""
    _, num_inputs, num_outputs = shape
    arena = PackedArena(400, block_bytes, device, rng)
    deltas = {
        slot: random_delta(rng, arena, num_inputs, num_outputs, dtype, ranks, int8)
        for slot in range(NUM_ADAPTERS)
    }
    widths = [8, num_inputs, 8]
    tables = DeviceTables(arena.data.view(-1), widths, [False] * NUM_SITES, 8, 4000, int8)
    for slot, delta in deltas.items():
        tables.enter(slot, {SITE: delta}, set())
    return tables, {(slot, SITE): delta for slot, delta in deltas.items()}


def apply(y, x, runs, tables, plan, num_ranks=256):
    planes = fast.Planes(16 * len(x), num_ranks, x.device)
    for part in disjoint_passes(runs):
        work = StepWork(tables, len(part), plan, num_ranks)
        work.fill(part)
        work.count()
        fast.add_lora(y, x, SITE, work, planes)


def check(shape, dtype, device, mix, plan, block_bytes=1024, ranks=(1, 3, 16, 17, 64), int8=False):
    num_rows, num_inputs, num_outputs = shape
    rng = random.Random(f"{mix}{shape}{plan}")
    torch.manual_seed(rng.randrange(1 << 30))
    tables, table = build(rng, shape, dtype, device, block_bytes, ranks, int8)
    slots = slots_of_mix(mix, num_rows, NUM_ADAPTERS, rng)
    slots.sort(key=lambda slot: (slot is None, slot or 0))
    runs = row_runs((1, [] if slot is None else [(slot, 0.5)]) for slot in slots)
    x = torch.randn(num_rows, num_inputs, device=device).to(dtype)
    base = torch.randn(num_rows, num_outputs, device=device).to(dtype)
    expected, actual = base.clone(), base.clone()
    naive.add_lora(expected, x, SITE, LoraBatch(runs, table))
    apply(actual, x, runs, tables, plan)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "mix", ["distinct", "uniform", "zipf", "identical", "skewed", "none", "half-base"]
)
def test_named_mixes_equal_the_naive_truth(mix, device):
    check((6, 20, 40), torch.float32, device, mix, PLANS["decode"], ranks=(1, 16, 17))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-I{s[1]}-O{s[2]}")
@pytest.mark.parametrize("family", PLANS)
def test_every_family_equals_the_naive_truth_on_odd_shapes(shape, family, device):
    check(shape, torch.float32, device, "uniform", PLANS[family])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", PLANS)
def test_half_precision_equals_the_naive_truth(dtype, family, device):
    check((5, 33, 34), dtype, device, "zipf", PLANS[family])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", PLANS)
def test_integers_are_widened_and_scaled_by_rank_row(dtype, family, device):
    check((5, 33, 34), dtype, device, "zipf", PLANS[family], ranks=(1, 16, 17), int8=True)


def test_rows_wider_than_a_block_are_read_in_pieces(device):
    check((3, 70, 90), torch.float32, device, "distinct", PLANS["decode"], 128, (1, 5))


def test_rows_that_combine_adapters_add_up(device):
    rng = random.Random(5)
    tables, table = build(rng, (4, 20, 20), torch.float32, device, 1024)
    runs = (RowRun(0, 0.5, 0, 3), RowRun(1, -2.0, 1, 4), RowRun(2, 1.0, 3, 4))
    assert [len(part) for part in disjoint_passes(runs)] == [2, 1]
    plain = {key: SiteDelta(d.slices, d.a, d.b, d.scales) for key, d in table.items()}
    for slot in range(NUM_ADAPTERS):
        tables.remove(slot)
        tables.enter(slot, {SITE: plain[slot, SITE]}, set())
    x, y = torch.randn(4, 20, device=device), torch.zeros(4, 20, device=device)
    expected = y.clone()
    naive.add_lora(expected, x, SITE, LoraBatch(runs, plain))
    apply(y, x, runs, tables, PLANS["decode"])
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_rows_outside_of_every_run_and_absent_sites_stay_as_they_are(device):
    tables, _ = build(random.Random(6), (4, 8, 8), torch.float32, device, 1024)
    x = torch.ones(4, 8, device=device)
    y = torch.full((4, 8), float("nan"), device=device)
    y[1:3] = 0.0
    runs = [RowRun(0, 1.0, 1, 3)]
    apply(y, x, runs, tables, PLANS["decode"])
    assert y[[0, 3]].isnan().all()
    assert not y[1:3].isnan().any()
    tables.remove(0)
    before = y.clone()
    apply(y, x, runs, tables, PLANS["decode"])
    assert y.equal(before) or torch.equal(y[1:3], before[1:3])


def test_the_result_does_not_depend_on_the_neighbours_in_the_batch(device):
    tables, _ = build(random.Random(7), (6, 70, 40), torch.float32, device, 1024, (3, 17))
    x = torch.randn(6, 70, device=device)
    alone, together = torch.zeros(1, 40, device=device), torch.zeros(6, 40, device=device)
    apply(alone, x[4:5].contiguous(), [RowRun(1, 1.0, 0, 1)], tables, PLANS["decode"])
    runs = [RowRun(0, 1.0, 0, 4), RowRun(1, 1.0, 4, 5), RowRun(2, 1.0, 5, 6)]
    apply(together, x, runs, tables, PLANS["decode"])
    assert together[4].equal(alone[0])


class AtOnce:
    """In place of a side stream where there is none: what forks has run before the join."""

    def __init__(self):
        self.events = []

    @contextmanager
    def fork(self):
        self.events.append("fork")
        yield

    def join(self):
        self.events.append("join")


def test_an_early_shrink_is_joined_once_and_adds_the_same(device):
    tables, _ = build(random.Random(8), (3, 20, 20), torch.float32, device, 1024, (3,))
    side = AtOnce()
    lora = fast.DeviceLora(tables, fast.Planes(64, 64, device), 20, side)
    runs = (RowRun(0, 1.0, 0, 2), RowRun(1, 1.0, 2, 3))
    x, early, late = (torch.randn(3, 20, device=device) for _ in range(3))
    late.copy_(early)
    batch = LoraBatch(runs, {}, None, tables, lora.begin(runs, 3, 4), lora.sites_of(runs))
    lora.start(x, SITE, batch)
    lora.add_lora(early, x, SITE, batch)
    lora.add_lora(late, x, SITE, batch)
    assert early.equal(late)
    lora.start(x, SITE + 1, batch)
    assert side.events == ["fork", "join"], "a site without adapters starts nothing"


def test_a_dense_run_and_its_neighbour_in_tiles_equal_torch(device):
    tables, table = build(random.Random(9), (1030, 20, 24), torch.float32, device, 1024, (128,))
    lora = fast.DeviceLora(tables, fast.Planes(1030, 512, device), 20)
    runs = (RowRun(0, 0.5, 0, 1024), RowRun(1, 1.0, 1024, 1028))
    dense = lora.dense_runs(runs, 1030)
    assert dense == runs[:1]
    works = lora.begin(runs[1:], 1030, 4)
    batch = LoraBatch(runs, table, None, tables, works, lora.sites_of(runs), dense)
    x, y = torch.randn(1030, 20, device=device), torch.randn(1030, 24, device=device)
    expected = y.clone()
    portable.add_lora(expected, x, SITE, batch)
    lora.add_lora(y, x, SITE, batch)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_the_largest_step_fits_into_the_planes_whatever_the_ranks(device):
    for max_ranks in (3, 16, 24):
        planes = fast.Planes(64, max_ranks, device)
        plan = planes.fit(PLANS["decode"], 64, fast.rank_stride_of(max_ranks), 4096)
        assert plan.num_planes(4096) == 1
