"""Families whose layers differ from one another, over the kernels against plain torch."""

import pytest
import torch

from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.cuda_graphs import forward_static
from loraplex_services.worker.runner.graph_inputs import DECODE
from loraplex_services.worker.types.step_plan import StepPlan, batch_order
from tests.worker.loading import HOST_CACHE_BYTES
from tests.worker.ops.triton.test_runner import AsksNobody
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base
from tests.worker.parity.driving import Driver, Job, greedy

ADAPTERS = ("rank-8-all-linear", "rank-1")
PROMPTS = ([5, 9, 44], list(range(60, 97)), [7] * 18)
pytestmark = pytest.mark.timeout(300)
NAMES = [
    "qwen3.5",
    "gemma4",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("qwen3.5-moe", "qwen3-next", "gemma4-all", "gemma4-moe")
    ),
]


@pytest.fixture(scope="module", params=NAMES)
def folders(request, tmp_path_factory):
    """The folder of a base, and those of its adapters."""
    root = tmp_path_factory.mktemp(request.param)
    base = make_base(request.param, root / "base")
    return base.folder, [make_adapter(base, name, root / name) for name in ADAPTERS]


def new_driver(folders, device, backend):
    base, adapters = folders
    runner = build_runner(
        base,
        device=device.type,
        dtype="float32",
        arena_bytes=8 << 20,
        host_cache_bytes=HOST_CACHE_BYTES,
        max_resident=4,
        max_lora_rank=32,
        attention_backend=backend,
    )
    driver = Driver(runner)
    for slot, folder in enumerate(adapters):
        driver.load(slot, folder)
    return driver


def new_jobs(num_tokens):
    """One of the base, and one of each adapter."""
    slots = (), ((0, 1.0),), ((1, 0.5),)
    return [
        Job(greedy(f"r{i}", prompt, num_tokens, logprobs=0), slots[i], arrival_step=i)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def drivers(folders):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [new_driver(folders, device, backend) for backend in ("triton", "vanilla")]


@pytest.mark.long
def test_chunked_prompts_and_decoding_rows_equal_plain_torch(drivers):
    found = []
    for driver in drivers:
        jobs = new_jobs(3)
        tokens = driver.run(jobs, chunk=20)
        found.append(
            (tokens, [[s.logprobs.logprob for s in job.samples if s.logprobs] for job in jobs])
        )
    assert found[0][0] == found[1][0]
    for ours, expected in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def decode_plan(driver):
    """A step of three rows that decode."""
    jobs = new_jobs(2)
    driver._collect([driver._launch(0, jobs, 100)])
    rows = sorted((driver._plan(job, 100) for job in jobs), key=batch_order)
    states = tuple(driver._spans(row) for row in rows) if driver.runner.state_blocks else ()
    return StepPlan(1, tuple(rows), states)


@pytest.mark.long
def test_static_inputs_of_a_decode_step_equal_those_of_an_eager_one(drivers):
    driver = drivers[0]
    runner, plan = driver.runner, decode_plan(driver)
    gpu, batches = runner._batches.gpu, runner._batches
    step, arena = batches.read(plan), runner.arena.data
    inputs = gpu.graph_inputs(DECODE)
    with torch.inference_mode():
        before = arena.clone()
        eager = runner._model.forward(batches.make(step))
        after = arena.clone()
        arena.copy_(before)
        batch = inputs.batch(4, gpu._masks[-1], gpu.lora_batch(()))  # a row of padding
        inputs.fill(step, batch)
        with AsksNobody() as asked:
            static = forward_static(runner._model, batch)
    torch.testing.assert_close(static[: len(plan.rows)], eager, rtol=1e-4, atol=1e-4)
    assert asked.questions == []
    states = slice(None) if not plan.states else plan.states[0][0].target
    torch.testing.assert_close(
        arena[states].view(torch.float32),
        after[states].view(torch.float32),
        rtol=1e-4,
        atol=1e-4,
        equal_nan=True,
    )


def test_a_warm_up_leaves_the_arena_as_it_is(drivers):
    runner = drivers[0].runner
    before = runner.arena.data.clone()
    with torch.inference_mode():
        batch = runner._batches.gpu.idle.batch(6)
        assert len(runner._model.forward(batch)) == 6
    assert torch.equal(runner.arena.data, before)
