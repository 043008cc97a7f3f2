"""A whole model over the kernels against the same model in torch, adapters mixed in one batch."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.checks import WrongResult, check_step
from loraplex.api.sampling import SamplingParams
from loraplex.errors import Unsupported
from loraplex_services.worker.adapters.device.copy_events import CopyEvents, StallTimer
from loraplex_services.worker.ops.attention import triton as attention
from loraplex_services.worker.ops.lora import triton as fast
from loraplex_services.worker.runner import building
from loraplex_services.worker.runner.allocation import kv_buffer
from loraplex_services.worker.runner.backends import choose_operators
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.cuda_graphs import forward_static
from loraplex_services.worker.runner.graph_inputs import DECODE
from loraplex_services.worker.runner.profiling import run_largest_step
from loraplex_services.worker.types.extents import extent_sizes
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.runner_settings import RunnerSettings
from loraplex_services.worker.types.step_plan import PlannedRow, StepPlan
from tests.worker.loading import (
    HOST_CACHE_BYTES,
    blocks_of,
    copied_image,
    in_blocks,
    load_adapter,
    taken,
)
from tests.worker.ops.triton.conftest import INTERPRETING
from tests.worker.tiny import write_adapter, write_base

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [[5, 6, 7, 8, 9], [11] * 18, [3, 2]]
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}
SLOTS = [((0, 1.0),), ((1, 0.5),), ()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    base = write_base(root / "base")
    adapters = [
        write_adapter(root / "attention", seed=1),
        write_adapter(root / "all", seed=2, rank=17, targets=ALL_LINEAR),
    ]
    config = adapters[1] / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_scaling": YARN}))
    return base, adapters


def make_runner(folders, device, backend, kept="auto"):
    base, adapters = folders
    settings = {"arena_bytes": 2 << 20, "max_resident": 4, "max_lora_rank": 32}
    settings |= {"host_cache_bytes": HOST_CACHE_BYTES, "kv_cache_dtype": kept}
    runner = build_runner(
        base, device=device.type, dtype="float32", attention_backend=backend, **settings
    )
    free = list(range(runner.arena_blocks))
    for slot, folder in enumerate(adapters):
        load_adapter(runner, slot, folder, partial(taken, free))
    return runner, free


def new_requests(free, num_groups):
    requests = []
    for i, prompt in enumerate(PROMPTS):
        request = Request(f"r{i}", list(prompt), SamplingParams(max_tokens=4, seed=i))
        request.block_tables = [[free.pop(), free.pop()] for _ in range(num_groups)]
        requests.append(request)
    return requests


def plan_of(requests):
    rows = []
    for request, slots in zip(requests, SLOTS, strict=True):
        start = request.num_computed
        rows.append(PlannedRow(request, start, request.num_pending, True, slots))
    return StepPlan(0, tuple(rows))


def forward(runner, plan):
    """Hidden states of an eager step."""
    return runner._model.forward(runner._batches.make(runner._batches.read(plan)))


def run_step(runner, requests):
    plan = plan_of(requests)
    for row, sampled in zip(plan.rows, runner.launch(plan).result(), strict=True):
        row.request.num_computed += row.num_tokens
        row.request.output_ids.append(sampled.token_id)


@pytest.fixture(scope="module")
def kernel_runner(folders):
    """One for all tests: on a GPU it captures its graphs once."""
    device = torch.device("cpu" if INTERPRETING else "cuda")
    return make_runner(folders, device, "triton")


@pytest.mark.parametrize(
    ("kept", "tolerance"),
    [
        ("auto", 1e-4),
        pytest.param("int8", 0.02, marks=pytest.mark.long),
        pytest.param("fp8", 0.2, marks=pytest.mark.long),
    ],
)
def test_tokens_and_static_batches_equal_those_of_torch(
    folders, kernel_runner, device, kept, tolerance
):
    """A rounding error may move a code of the cache to its neighbour."""
    runs = {}
    for name in ("vanilla", "triton"):
        is_known = name == "triton" and kept == "auto"
        runner, free = kernel_runner if is_known else make_runner(folders, device, name, kept)
        requests = new_requests(free, len(runner.kv_group_windows))
        for _ in range(2):
            run_step(runner, requests)
        runs[name] = runner, plan_of(requests), [request.output_ids for request in requests]
    (plain, plain_plan, expected), (runner, plan, outputs) = runs.values()
    assert outputs == expected

    gpu, batches = runner._batches.gpu, runner._batches
    inputs = gpu.graph_inputs(DECODE)
    assert batches.make(batches.read(plan)).rope_rows is not None
    fewer = StepPlan(1, plain_plan.rows[1:]), StepPlan(1, plan.rows[1:])
    for plain_step, step in ((plain_plan, plan), fewer):  # what one step leaves, the next replaces
        with torch.inference_mode():
            eager = forward(plain, plain_step)
            read = batches.read(step)
            inputs.buffer.fill(read, read.runs)
            batch = inputs.batch(4, gpu._masks[-1], gpu.lora_batch(()))  # rows of padding
            with AsksNobody() as asked:
                static = forward_static(runner._model, batch)
        found = static[: len(step.rows)]
        torch.testing.assert_close(found, eager, rtol=tolerance, atol=tolerance)
        assert (found - eager).abs().median() < 1e-4
        assert asked.num_operators > 10
        assert asked.questions == []


class AsksNobody(TorchDispatchMode):
    """Notes operators whose result's shape or value a GPU would have to tell the host, which ends
    a capture."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "bincount")

    def __init__(self):
        super().__init__()
        self.num_operators = 0
        self.questions = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operators += 1
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith("index") and len(args) > 1 else ()
        by_mask = any(
            isinstance(part, torch.Tensor) and part.dtype is torch.bool
            for part in (indices if isinstance(indices, list | tuple) else ())
        )
        if by_mask or name.startswith(self.WAITING):
            self.questions.append(name)
        return func(*args, **kwargs or {})


def test_questions_to_the_device_are_seen():
    values = torch.arange(4)
    for ask in (
        lambda: values.sum().item(),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: bool((values > 1).any()),
    ):
        with AsksNobody() as asked:
            ask()
        assert asked.questions


class BytesToCome:
    """An event whose extent has its bytes once a stream has waited for it."""

    def __init__(self, arena, place, num_pages):
        pages = arena.data.view(-1, arena.page_bytes)
        self._extent = pages[place : place + num_pages]
        self._bytes = self._extent.clone()
        self._extent.fill_(0xFF)  # NaN in any floating-point type

    def query(self):
        return False

    def wait(self):
        self._extent.copy_(self._bytes)

    def elapsed_time(self, _):
        return 0.0


def test_no_byte_of_an_adapter_being_copied_is_read_before_its_copy_ends(folders, kernel_runner):
    runner, free = kernel_runner
    folder, slot = folders[1][1], 2
    index = runner._adapters._packer.pack(folder).index
    blocks = taken(free, blocks_of(runner, index.num_pages))
    _, positions = in_blocks(runner, index.num_pages, blocks)
    load_adapter(runner, slot, folder, lambda _: blocks)
    request = Request("being-copied", PROMPTS[2], SamplingParams(max_tokens=4, seed=1))
    request.block_tables = [[free.pop(), free.pop()] for _ in runner.kv_group_windows]
    row = PlannedRow(request, 0, len(PROMPTS[2]), True, ((slot, 1.0),))
    plan = StepPlan(0, (row,))
    with torch.inference_mode():
        expected = forward(runner, plan)
    runner.unload_adapter(slot)

    sizes = extent_sizes(index.num_pages, runner.arena.pages_per_block)
    events = [BytesToCome(runner.arena, *e) for e in zip(positions, sizes, strict=True)]
    assert len(events) > 1
    copy_events = CopyEvents(index, InOrder(events), StallTimer(lambda: events[0]))
    runner.enter_adapter(slot, copied_image(folder, index, positions, copy_events))
    with torch.inference_mode():
        found = forward(runner, plan)
    assert torch.equal(found, expected)
    assert copy_events.is_done
    runner.unload_adapter(slot)
    free += blocks


class InOrder(list):
    """Waiting for one event of a stream is waiting for all before it."""

    def __getitem__(self, block):
        for event in self[:block] if isinstance(block, int) else ():
            event.wait()
        return super().__getitem__(block)


def test_an_adapter_that_leaves_while_it_lands_is_waited_for(folders, kernel_runner):
    """Its blocks are free for steps to write, and its copy would overwrite that."""
    runner, free = kernel_runner
    folder = folders[1][0]
    index = runner._adapters._packer.pack(folder).index
    _, positions = in_blocks(runner, index.num_pages, free)
    sizes = extent_sizes(index.num_pages, runner.arena.pages_per_block)
    events = [BytesToCome(runner.arena, *e) for e in zip(positions, sizes, strict=True)]
    copy_events = CopyEvents(index, events, StallTimer(lambda: events[0]))
    runner.enter_adapter(3, copied_image(folder, index, positions, copy_events))
    assert not copy_events.is_done
    runner.unload_adapter(3)
    assert copy_events.is_done


def test_benchmarks_notice_updates_that_are_missing(kernel_runner, device, monkeypatch):
    runner, free = kernel_runner
    requests = new_requests(free, len(runner.kv_group_windows))
    run_step(runner, requests)
    bench = SimpleNamespace(runner=runner, device=device, itemsize=4)
    plan = plan_of(requests)
    check_step(bench, plan)
    monkeypatch.setattr(fast, "_expand", lambda *_: None)
    with pytest.raises(WrongResult, match="the product with adapters at site"):
        check_step(bench, plan)


def test_a_warm_up_leaves_the_arena_as_it_is(kernel_runner):
    runner, _ = kernel_runner
    before = runner.arena.data.clone()
    with torch.inference_mode():
        hidden = runner._model.forward(runner._batches.gpu.idle.batch(6))
    assert hidden.shape[0] == 6
    assert runner.arena.data.equal(before)


def test_a_warm_up_launches_attention_of_passes_without_a_cache_of_codes(
    folders, device, monkeypatch
):
    runner, _ = make_runner(folders, device, "triton", "fp8")
    launch = attention.attend_contexts
    dtypes = set()

    def noted(out, q, planes, *others, **options):
        dtypes.add(planes[0].dtype)
        launch(out, q, planes, *others, **options)

    monkeypatch.setattr(attention, "attend_contexts", noted)
    runner._batches.gpu.idle.warm_up(3)
    assert dtypes == {torch.float8_e4m3fn, torch.float32}


def test_a_warm_up_of_more_rows_than_the_context_stays_within_it(kernel_runner, monkeypatch):
    runner, _ = kernel_runner
    model = runner._model
    short = dataclasses.replace(model.config, max_position_embeddings=4)
    monkeypatch.setattr(model, "config", short)
    batch = runner._batches.gpu.idle.batch(6)
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    with torch.inference_mode():
        assert model.forward(batch).isfinite().all()


@pytest.mark.skipif(INTERPRETING, reason="graphs need a GPU")
def test_graph_replay_equals_eager(kernel_runner, device):
    runner, free = kernel_runner
    requests = new_requests(free, len(runner.kv_group_windows))
    run_step(runner, requests)
    plan, gpu = plan_of(requests), runner._batches.gpu
    with torch.inference_mode():
        eager = forward(runner, plan)
        before = torch.zeros(0, dtype=torch.int64, device=device)
        step = runner._batches.read(plan)
        replayed = gpu.replay(gpu.graph_of(step), step, before)
    torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-4)


def test_a_dtype_of_adapters_that_the_kernels_do_not_read_is_refused(folders, device):
    """They read adapters in the type of the model, which is float32 here."""
    settings = {"arena_bytes": 2 << 20, "max_resident": 4, "attention_backend": "triton"}
    with pytest.raises(Unsupported, match="lora_dtype: these kernels read adapters in the model's"):
        build_runner(
            folders[0], device=device.type, dtype="float32", lora_dtype="bfloat16", **settings
        )


def test_the_largest_step_is_run_to_measure_it_and_writes_nothing(folders, device):
    """In a cache of a few blocks, before the arena is there."""
    dtype = torch.float32
    operators = choose_operators(device, dtype, "auto", "triton")
    model = building._read_model(
        folders[0], RunnerSettings(arena_bytes=0), dtype, device, operators
    )
    kv = kv_buffer(model.config, dtype, device, 1 << 20)
    kv.arena.data.zero_()
    logits = run_largest_step(model, operators, kv, max_num_tokens=40, max_num_rows=3)
    assert logits.shape == (3, model.config.vocab_size) and logits.isfinite().all()
    assert not kv.arena.data.any()
