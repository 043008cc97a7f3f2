"""Runs that are nearly the whole step, as library products."""

import random

import pytest
import torch

from loraplex_services.worker.ops.lora import reference
from loraplex_services.worker.ops.lora.dense import add_dense
from loraplex_services.worker.ops.lora.runs import DENSE_MIN_ROWS, RowRun, dense_runs
from loraplex_services.worker.ops.lora.tables import SiteDelta, Slice, Tile
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from tests.worker.ops.triton.adapters import TOLERANCE, PackedArena, random_delta

SITE = 2


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_dense_run_equals_the_naive_truth(dtype, int8):
    rng = random.Random(f"{dtype}{int8}")
    torch.manual_seed(4)
    arena = PackedArena(400, 1024, "cpu", rng)  # wide rows are cut into pieces
    delta = random_delta(rng, arena, 600, 41, dtype, (1, 17, 64), int8)
    run = RowRun(5, 0.5, 1, 6)
    x, y = torch.randn(7, 600).to(dtype), torch.randn(7, 41).to(dtype)
    expected = y.clone()
    reference.add_lora(expected, x, SITE, LoraBatch((run,), {(5, SITE): delta}))
    add_dense(y, x, delta, run)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.float(), expected.float(), rtol=tolerance, atol=tolerance)
    assert y[[0, 6]].equal(expected[[0, 6]]), "rows outside of the run"


def test_a_slice_whose_tiles_lie_next_to_each_other_is_one_product():
    torch.manual_seed(7)
    rank, num_inputs, num_outputs = 32, 24, 16
    arena = torch.randn(2 * rank * (num_inputs + num_outputs))
    matrices = {}
    begin = 0
    for name, width in (("a", num_inputs), ("b", num_outputs)):
        tiles = []
        for row in (0, 16):
            view = arena[begin : begin + 16 * width].view(16, width)
            tiles.append(Tile(row, row + 16, 0, width, view))
            begin += 16 * width
        matrices[name] = tuple(tiles)
    scales = torch.full((rank,), 0.5)
    delta = SiteDelta((Slice(0, rank, 0, num_outputs, 0.5),), **matrices, scales=scales)
    run = RowRun(1, 2.0, 0, 5)
    x, y = torch.randn(5, num_inputs), torch.randn(5, num_outputs)
    expected = y.clone()
    reference.add_lora(expected, x, SITE, LoraBatch((run,), {(1, SITE): delta}))
    with torch.profiler.profile() as profile:
        add_dense(y, x, delta, run)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    products = [event for event in profile.events() if event.name in ("aten::mm", "aten::addmm_")]
    assert len(products) == 2, [event.name for event in products]


def test_long_runs_are_dense_unless_rows_combine_adapters():
    long, short = RowRun(0, 1.0, 0, DENSE_MIN_ROWS), RowRun(1, 1.0, DENSE_MIN_ROWS, 300)
    assert dense_runs((long, short)) == (long,)
    assert dense_runs((long, RowRun(1, 1.0, 3, 5))) == ()


def test_a_batch_whose_runs_are_all_dense_has_no_tiled_runs():
    run = RowRun(0, 1.0, 0, DENSE_MIN_ROWS)
    assert LoraBatch((run,), {}, dense=(run,)).tiled == ()
    assert LoraBatch((run,), {}).tiled == (run,)
