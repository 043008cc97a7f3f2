"""Runs that are nearly the whole step, as library products."""

import random

import pytest
import torch

from services.worker.kernels.lora import naive
from services.worker.kernels.lora.dense import add_dense
from services.worker.kernels.lora.plan import is_dense
from services.worker.kernels.lora.runs import RowRun
from services.worker.kernels.lora.worklist import LoraBatch
from tests.worker.kernels.triton.adapters import TOLERANCE, PackedArena, random_delta

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
    naive.add_lora(expected, x, SITE, LoraBatch((run,), {(5, SITE): delta}))
    add_dense(y, x, delta, run)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.float(), expected.float(), rtol=tolerance, atol=tolerance)
    assert y[[0, 6]].equal(expected[[0, 6]]), "rows outside of the run"


@pytest.mark.parametrize(
    ("run_rows", "num_rows", "rank", "expected"),
    [
        (2048, 2048, 192, True),
        (2048, 2100, 128, True),
        (2048, 2048, 48, False),  # bytes rule
        (512, 512, 192, False),  # too few rows for a library to win
        (1024, 2048, 192, False),  # other adapters have as much
    ],
)
def test_one_adapter_of_a_high_rank_over_a_long_step_is_dense(run_rows, num_rows, rank, expected):
    assert is_dense(run_rows, num_rows, rank) is expected
