"""Forward passes that are cut into segments at each attention, against eager ones."""

import pytest
import torch

from benchmarks.gpu.checks import without_library
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.ops.lora import runs
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.mixed_graphs import MixedGraphs, SegmentRecorder, first_rows
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.loading import HOST_CACHE_BYTES, adapter_blocks, load_adapter
from tests.worker.ops.triton.conftest import INTERPRETING
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
    blocks = [FREE_BLOCKS.pop() for _ in range(adapter_blocks(made, adapter))]
    load_adapter(made, 0, adapter, blocks)
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


class AttendingRecorder(SegmentRecorder):
    """Attends where a capture would be interrupted: what a replay does, in one pass."""

    def __init__(self, inputs, size, attention):
        super().__init__(inputs, size)
        self._attention = attention

    def metadata(self):
        self._interrupting = super().metadata()
        return self._interrupting

    def interrupt(self, *call):
        attended, num_tokens = super().interrupt(*call), self._attention.num_tokens
        self._attention.rotations = first_rows(self._interrupting.rotations, num_tokens)
        self.segments[-2].attention.run(self._attention)
        return attended


@pytest.mark.long
def test_a_pass_cut_at_each_attention_equals_an_eager_one(runner, device):
    gpu = runner._batches.gpu
    plan = mixed_plan(runner, lambda before: eager(runner, before))
    expected = eager(runner, plan)
    inputs = gpu.mixed_inputs(64)
    step = runner._batches.read(plan)
    with torch.inference_mode():
        inputs.buffer.fill(step, step.runs)
        recorder = AttendingRecorder(inputs, 64, inputs.metadata(step, ()))
        graphs = MixedGraphs(runner._model, inputs, gpu.lora_batch(()))
        found = graphs.record(recorder, gpu._masks[-1])
    torch.testing.assert_close(found.hidden[: len(expected)], expected, rtol=1e-4, atol=1e-4)
    num_layers = len(runner._model._layers)
    assert len(recorder.segments) == num_layers + 1
    sites = [site for chunk in recorder.segments for site in chunk.sites]
    assert sorted(sites) == sorted(gpu._masks[-1]), "each site is waited for in its own segment"


def test_a_step_with_library_products_equals_one_of_kernels_alone(runner, monkeypatch):
    monkeypatch.setattr(runs, "DENSE_MIN_ROWS", 8)
    plan = mixed_plan(runner, lambda before: eager(runner, before))
    with torch.inference_mode():
        batch = runner._batches.make(runner._batches.read(plan))
        alone = without_library(runner._batches.gpu, batch)
        assert batch.lora.dense and not alone.lora.dense
        expected = runner._model.forward(batch)
        found = runner._model.forward(alone)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_mixed_step_finds_the_smallest_size_that_holds_it(runner):
    gpu = runner._batches.gpu
    graphs = MixedGraphs(runner._model, gpu.mixed_inputs(200), gpu.lora_batch(()))
    assert graphs.sizes == (64, 128, 192)
    for num_tokens, size in ((1, 64), (64, 64), (65, 128), (192, 192), (193, None)):
        request = Request("r", [1] * 300, SamplingParams(9, seed=0))
        row = PlannedRow(request, 0, num_tokens, False, ())
        step = runner._batches.read(StepPlan(0, (row,)))
        assert graphs.size_for(step) == size


@pytest.mark.skipif(INTERPRETING, reason="graphs need a GPU")
def test_replayed_graphs_equal_an_eager_step(runner, device):
    gpu = runner._batches.gpu
    plan = mixed_plan(runner, lambda before: eager(runner, before))
    expected = eager(runner, plan).clone()
    step = runner._batches.read(plan)
    graph = gpu.graph_of(step)
    assert len(graph.segments) == len(runner._model._layers) + 1
    before = torch.zeros(0, dtype=torch.int64, device=device)
    with torch.inference_mode():
        for _ in range(2):  # what a replay leaves behind changes nothing in the next
            found = gpu.replay(graph, step, before)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
