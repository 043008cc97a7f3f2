"""Tiles of rows that use one adapter each, against the reference."""

import random

import pytest
import torch

from loraplex_services.worker.ops.linear.torch import DenseLinear
from loraplex_services.worker.ops.lora import long_runs, reference, step_work, triton_kernels
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora import triton as fast
from loraplex_services.worker.ops.lora.device_records import OutputRange
from loraplex_services.worker.ops.lora.long_runs import SPLIT_INPUTS, make_long_work
from loraplex_services.worker.ops.lora.runs import LONG_MIN_ROWS, RowRun, divided
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from tests.worker.ops.triton.adapters import TOLERANCE
from tests.worker.ops.triton.test_lora import (
    SITE,
    bits_below_half_precision,
    build,
    plain_tables,
)

RUNS = (RowRun(0, 1.5, 1, 70), RowRun(2, -0.5, 70, 82), RowRun(1, 1.0, 90, 131))
"""Of one tile and a part of another, of less than a tile, and after rows without an adapter."""


def check(dtype, device, num_inputs, num_outputs, runs=RUNS, **setting):
    torch.manual_seed(3)
    num_rows = runs[-1].end + 2
    shape = num_rows, num_inputs, num_outputs
    tables, table = build(random.Random(5), shape, dtype, device, **setting)
    x = torch.randn(num_rows, num_inputs, device=device).to(dtype)
    y = torch.randn(num_rows, num_outputs, device=device).to(dtype)
    expected = y.clone()
    reference.add_lora(expected, x, SITE, LoraBatch(runs, table))
    work = make_long_work(tables, runs)
    for _ in range(2):  # what a launch leaves behind changes nothing in the next
        found = y.clone()
        for workspace in (work.partial, work.intermediate):
            workspace.fill_(torch.nan)
        work.shrink(x, SITE)
        work.expand(found, SITE)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
    outside = [row for row in range(num_rows) if not any(r.begin <= row < r.end for r in runs)]
    assert found[outside].equal(y[outside])


@pytest.mark.parametrize(
    ("dtype", "int8"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float16, False),
        pytest.param(torch.float32, True, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.long),
        pytest.param(torch.float16, True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_long_runs_equal_the_naive_truth(dtype, int8, device):
    check(dtype, device, 33, 40, block_bytes=1024, int8=int8, cuts=(24,))


def test_rows_wider_than_a_block_are_read_in_parts(device):
    check(torch.float32, device, 40, 50, block_bytes=128, ranks=(1, 5))


def test_sums_over_several_splits_of_the_inputs_equal_the_naive_truth(device):
    check(torch.float32, device, SPLIT_INPUTS + 9, 24, block_bytes=1 << 18, ranks=(1, 17))


def test_ranks_of_several_blocks_equal_the_naive_truth(device):
    check(torch.float32, device, 20, 24, RUNS[:1], block_bytes=1024, ranks=(150,), cuts=(8, 16))


@pytest.mark.parametrize("rank", [1, 16, 17, 64, 65, 257])
def test_adapters_of_every_loop_over_rank_rows_equal_the_naive_truth(rank, device):
    torch.manual_seed(rank)
    parts = OutputRange(SITE, 0, 32), OutputRange(SITE, 32, 16)
    tables, table = plain_tables(torch.float32, device, 32, parts, (rank,))
    runs = (RowRun(0, 0.5, 0, LONG_MIN_ROWS),)
    x, y = (torch.randn(LONG_MIN_ROWS, width, device=device) for width in (32, 48))
    expected = y.clone()
    reference.add_lora(expected, x, SITE, LoraBatch(runs, table))
    work = make_long_work(tables, runs)
    work.shrink(x, SITE)
    work.expand(y, SITE)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_the_intermediate_is_not_rounded_to_half_precision(device):
    tables = bits_below_half_precision(device)
    shape = LONG_MIN_ROWS, 16
    x, y = (torch.full(shape, value, device=device).bfloat16() for value in (1.0, -1.0))
    work = make_long_work(tables, [RowRun(0, 1.0, 0, LONG_MIN_ROWS)])
    work.shrink(x, SITE)
    work.expand(y, SITE)
    assert (y == 2.0**-10).all()


def test_a_row_does_not_depend_on_the_other_rows_of_the_step(device):
    tables, _ = build(random.Random(7), (80, 70, 40), torch.float32, device, 1024, (3, 17))
    x = torch.randn(160, 70, device=device)
    together, alone = torch.zeros(160, 40, device=device), torch.zeros(70, 40, device=device)
    for y, rows, runs in (
        (together, x, (RowRun(0, 1.0, 0, 75), RowRun(1, 1.0, 75, 145))),
        (alone, x[75:145], (RowRun(1, 1.0, 0, 70),)),
    ):
        work = make_long_work(tables, runs)
        work.shrink(rows, SITE)
        work.expand(y, SITE)
    assert together[75:145].equal(alone)


def test_a_step_of_long_and_short_runs_equals_torch(device):
    num_rows = LONG_MIN_ROWS + 6
    tables, table = build(random.Random(9), (num_rows, 20, 24), torch.float32, device, 1024, (17,))
    lora = fast.DeviceLora(tables)
    runs = (RowRun(0, 0.5, 0, LONG_MIN_ROWS), RowRun(1, 1.0, LONG_MIN_ROWS, num_rows - 2))
    short, long = divided(runs)
    assert short and long
    work = lora.begin(short, num_rows)
    batch = LoraBatch(runs, table, None, tables, work, make_long_work(tables, long))
    x, y = torch.randn(num_rows, 20, device=device), torch.randn(num_rows, 24, device=device)
    expected = y.clone()
    portable.add_lora(expected, x, SITE, batch)
    lora.add_lora(y, x, SITE, batch)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_a_step_whose_runs_are_all_long_launches_nothing_for_short_ones(device, monkeypatch):
    num_rows = LONG_MIN_ROWS
    tables, table = build(random.Random(3), (num_rows, 20, 24), torch.float32, device, 1024, (17,))
    runs = (RowRun(0, 0.5, 0, num_rows),)
    batch = LoraBatch(runs, table, None, tables, long=make_long_work(tables, runs))
    x, weight = torch.randn(num_rows, 20, device=device), torch.randn(24, 20, device=device)
    expected = x @ weight.T
    portable.add_lora(expected, x, SITE, batch)
    monkeypatch.delattr(triton_kernels, "update_site")
    monkeypatch.delattr(step_work.StepWork, "list_groups")
    y = fast.DeviceLora(tables).product(DenseLinear(weight), x, SITE, batch)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


def test_captured_steps_hold_the_tiles_of_as_many_rows_as_they_have():
    shortest = [RowRun(0, 1.0, row, row + LONG_MIN_ROWS) for row in range(0, 960, LONG_MIN_ROWS)]
    longer = [RowRun(0, 1.0, row, row + LONG_MIN_ROWS + 1) for row in range(0, 950, 65)]
    for runs in (shortest, longer, [RowRun(0, 1.0, 0, 1024)]):
        tiles = sum(-(-(run.end - run.begin) // long_runs.BLOCK_ROWS) for run in runs)
        assert tiles <= long_runs.max_tiles(runs[-1].end)
