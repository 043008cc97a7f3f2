"""Plans: families by rows, and files of measured plans over the table's."""

import torch

from services.worker.kernels.lora.plan import PLANS_FLOAT32, PLANS_HALF, family_of
from services.worker.kernels.lora.tuned import read_plans, tuned_plan, write_plans


def test_families_follow_the_longest_run_and_the_rows_of_the_step():
    assert family_of(max_run_rows=1, num_rows=256) == "decode"
    assert family_of(max_run_rows=64, num_rows=64) == "decode"
    assert family_of(max_run_rows=500, num_rows=512) == "mixed"
    assert family_of(max_run_rows=2048, num_rows=2048) == "prefill"


def test_a_measured_plan_takes_the_place_of_the_tables(tmp_path):
    best = PLANS_HALF["decode"].with_fewer_planes()
    write_plans(tmp_path / "sm_90.json", {"decode": best})
    half, single = read_plans(tmp_path / "sm_90.json")
    assert half["decode"] == best != PLANS_HALF["decode"]
    assert half["prefill"] == PLANS_HALF["prefill"]
    assert single == PLANS_FLOAT32


def test_without_a_file_the_table_holds(tmp_path):
    assert read_plans(tmp_path / "sm_80.json") == (PLANS_HALF, PLANS_FLOAT32)
    assert tuned_plan(1, 8, 2, torch.device("cpu")) == PLANS_HALF["decode"]
