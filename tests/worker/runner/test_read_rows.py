"""The end of a pass computes only the rows whose hidden states are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.api.pooling import Pooling
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.parity.bases import make_base


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request, tmp_path_factory) -> TorchRunner:
    folder = make_base("llama", tmp_path_factory.mktemp("base")).folder
    made = build_runner(folder, device="cpu", dtype=request.param, arena_bytes=8 << 20)
    if made._batches.records is None:
        pytest.skip("no compiled kernels")
    return made


def plan(**fields: object) -> StepPlan:
    """Prompts of 5, 1 and 7 tokens, whose cache is not kept; `fields` are those of the last."""
    params = fields.pop("params", {})
    rows = []
    for length in (5, 1, 7):
        is_last = length == 7
        sampling = SamplingParams(max_tokens=9, seed=0, **(params if is_last else {}))
        request = Request(f"{length}", list(range(3, 3 + length)), sampling)
        if is_last and "pooling" in fields:
            request.pooling = fields["pooling"]
        if is_last:
            request.routed_from = fields.get("routed_from")
        rows.append(PlannedRow(request, 0, length, True, ()))
    return StepPlan(0, tuple(rows))


def test_only_rows_that_are_read_are_computed_and_have_the_same_bits(runner: TorchRunner) -> None:
    batches, model = runner._batches, runner._model
    batch = batches.make(batches.read(plan()))
    assert batch.read_rows is not None
    assert batch.read_rows.tolist() == [4, 5, 12]
    with torch.inference_mode():
        some = model.forward(batch)
        everything = model.forward(replace(batch, read_rows=None))
    assert some[batch.read_rows].equal(everything[batch.read_rows])
    assert everything.any(dim=-1).all()
    assert some.any(dim=-1).nonzero()[:, 0].tolist() == [4, 5, 12]


@pytest.mark.parametrize(
    "fields", [{"params": {"prompt_logprobs": 1}}, {"pooling": Pooling.MEAN}, {"routed_from": 0}]
)
def test_all_rows_are_computed_where_a_request_reads_its_prompt(runner, fields) -> None:
    batches = runner._batches
    assert batches.make(batches.read(plan(**fields))).read_rows is None
