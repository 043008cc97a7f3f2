"""Plans: families by rows, and files of measured plans over the table's."""

import torch

from services.worker.kernels.lora import tuned
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


BY_HAND = """{"half": {"decode": {
    "short": {"uses_dot": false, "block_rows": 1, "block_inputs": 256, "split_inputs": 2048,
              "block_outputs": 128, "block_ranks": 16},
    "long": {"uses_dot": true, "block_rows": 16, "block_inputs": 128, "split_inputs": 2048,
             "block_outputs": 128, "block_ranks": 16},
    "short_max": 2, "num_warps": 8, "num_stages": 4, "programs_per_processor": 16}}}
"""


def test_a_gpu_uses_the_file_of_its_capability_and_no_other(tmp_path, monkeypatch):
    (tmp_path / "sm_90.json").write_text(BY_HAND)
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    gpu = torch.device("cuda")
    for capability, short_max in ((90, 2), (80, PLANS_HALF["decode"].short_max)):
        monkeypatch.setattr(tuned, "capability_of", lambda _, found=capability: found)
        assert tuned_plan(1, 8, 2, gpu).short_max == short_max
        assert tuned_plan(1, 8, 4, gpu) == PLANS_FLOAT32["decode"]
