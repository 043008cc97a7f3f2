"""Steps that compute prompts over static inputs, against eager ones."""

from functools import partial

import pytest
import torch

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.ops.lora import runs
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.cuda_graphs import forward_static
from loraplex_services.worker.runner.graph_inputs import MAX_CONTEXTS, mixed_kind
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.loading import HOST_CACHE_BYTES, load_adapter, taken
from tests.worker.ops.triton.conftest import INTERPRETING
from tests.worker.ops.triton.test_runner import AsksNobody
from tests.worker.tiny import write_adapter, write_base

FREE_BLOCKS: list[int] = []
"""Of the runner's arena."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    base, adapter = write_base(root / "base"), write_adapter(root / "a", seed=1)
    made = build_runner(
        base,
        device="cpu" if INTERPRETING else "cuda",
        dtype="float32",
        arena_bytes=2 << 20,
        host_cache_bytes=HOST_CACHE_BYTES,
        max_resident=4,
        max_lora_rank=32,
    )
    FREE_BLOCKS.extend(range(made.arena_blocks))
    load_adapter(made, 0, adapter, partial(taken, FREE_BLOCKS))
    return made


def mixed_plan(runner, steps_before):
    """Two prompts, one of them half computed, alongside a request that decodes."""
    rows = []
    for name, num_prompt, start, num_tokens, slots in (
        ("prompt", 11, 0, 11, ((0, 0.5),)),
        ("half", 40, 20, 13, ()),
        ("decodes", 5, 5, 1, ((0, 0.5),)),
    ):
        request = Request(name, list(range(2, 2 + num_prompt)), SamplingParams(9, seed=0))
        request.output_ids = [3] if start == num_prompt else []
        request.block_tables = [
            [FREE_BLOCKS.pop() for _ in range(3)] for _ in runner.kv_group_windows
        ]
        if start:
            before = PlannedRow(request, 0, start, False, slots)
            steps_before(StepPlan(0, (before,)))
        rows.append(PlannedRow(request, start, num_tokens, True, slots))
    return StepPlan(1, tuple(rows))


def eager(runner, plan):
    with torch.inference_mode():
        return runner._model.forward(runner._batches.make(runner._batches.read(plan)))


@pytest.mark.long
def test_a_static_batch_computes_steps_with_any_mix_of_prompts_and_generations(runner):
    gpu = runner._batches.gpu
    rows = mixed_plan(runner, lambda before: eager(runner, before)).rows
    inputs = gpu.graph_inputs(mixed_kind(64))
    batch = inputs.batch(64, gpu._masks[-1], gpu.lora_batch(()))
    for part in (rows, rows[:2], rows[2:], rows[1:]):  # what one leaves, the next replaces
        plan = StepPlan(1, part)
        expected = eager(runner, plan)
        with torch.inference_mode():
            inputs.fill(runner._batches.read(plan), batch)
            with AsksNobody() as asked:
                found = forward_static(runner._model, batch)
        torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-4, atol=1e-4)
        assert found.isfinite().all(), "padding may choose experts"
        assert asked.num_operators > 10
        assert asked.questions == []


def test_a_step_of_long_runs_equals_one_of_short_runs(runner, monkeypatch):
    plan = mixed_plan(runner, lambda before: eager(runner, before))
    expected = eager(runner, plan)
    monkeypatch.setattr(runs, "LONG_MIN_ROWS", 8)
    _, long = runs.divided(runner._batches.read(plan).runs)
    assert long
    torch.testing.assert_close(eager(runner, plan), expected, rtol=1e-4, atol=1e-4)


def test_a_mixed_step_finds_the_smallest_size_that_holds_it(runner):
    gpu = runner._batches.gpu
    inputs = gpu.graph_inputs(mixed_kind(200))
    assert inputs.kind.sizes == (64, 128, 192)
    for num_tokens, size in ((1, 64), (64, 64), (65, 128), (192, 192), (193, None)):
        request = Request("r", [1] * 300, SamplingParams(9, seed=0))
        row = PlannedRow(request, 0, num_tokens, False, ())
        step = runner._batches.read(StepPlan(0, (row,)))
        assert inputs.size_for(step) == size
    for num_prompts, size in ((MAX_CONTEXTS, 64), (MAX_CONTEXTS + 1, None)):
        rows = [
            PlannedRow(Request(str(i), [1], SamplingParams(9, seed=0)), 0, 1, True, ())
            for i in range(num_prompts)
        ]
        assert inputs.size_for(runner._batches.read(StepPlan(0, tuple(rows)))) == size


@pytest.mark.skipif(INTERPRETING, reason="graphs need a GPU")
def test_replayed_graphs_equal_an_eager_step(runner, device):
    gpu = runner._batches.gpu
    plan = mixed_plan(runner, lambda before: eager(runner, before))
    expected = eager(runner, plan).clone()
    step = runner._batches.read(plan)
    graph = gpu.graph_of(step)
    before = torch.zeros(0, dtype=torch.int64, device=device)
    with torch.inference_mode():
        for _ in range(2):  # what a replay leaves behind changes nothing in the next
            found = gpu.replay(graph, step, before)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
