"""Host time of the engine's steps on the GPU path, measured on a CPU.

    python -m benchmarks.gpu.host_time [--batch 64 256] [--context 1024 8192]

One engine with a tiny base and 64 adapters decodes a full batch. Everything that the host does for
a step runs as it does alongside a GPU: planning, block tables, row runs, input tensors, reading the
tokens, and encoding the message to the API server process. What a GPU would do is replaced: graphs
replay nothing, and an eager forward pass returns at once. Times are medians of `process_time` and
leave out what only a GPU costs: copies, launches of kernels, and launches of graphs.

Three kinds of steps are measured. In `steady`, nothing but decoding happens. In `leaving`, one
request is cancelled before each step. In `mixed`, one is cancelled and another begins, so that each
step computes a prompt of 64 tokens alongside the rest.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import msgspec
import torch
from torch import Tensor

from benchmarks.gpu import common
from benchmarks.llama import ATTENTION, Shape, write_adapter, write_base_config
from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.ops.attention.triton_backend import TritonAttentionMetadata
from loraplex_services.worker.ops.lora.step_work import StepWork
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.cuda_graphs import CapturedStep, CapturedSteps, GraphMemory
from loraplex_services.worker.runner.graph_inputs import DECODE, mixed_kind
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.steps import InlineExecutor, StepOrder
from loraplex_services.worker.sampling.drawing import TORCH_DRAWS
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Cancel,
    Command,
    EngineConfig,
    Submit,
)

SHAPE = Shape("host", 128, 32, 32, 1, 2, 1)
NUM_ADAPTERS, RANK = 64, 16
NUM_NEW_PROMPT = 64
MAX_STEP_TOKENS = 16384
MAX_OUTPUT = 512
WARM_UP_STEPS = 20


class NoGraph:
    """Stands for a captured graph."""

    def replay(self) -> None:
        """Compute nothing."""


class EmptySteps(CapturedSteps):
    """Graphs whose replay computes nothing."""

    def capture_step(self, size: int, sites: frozenset[int], memory: GraphMemory) -> CapturedStep:
        batch = self.inputs.batch(size, sites, self._table)
        return CapturedStep(NoGraph(), self.inputs, batch, torch.zeros(size, SHAPE.hidden_size))


def make_runner(root: Path, num_rows: int, num_tokens: int) -> TorchRunner:
    """A runner of the GPU path whose device computes nothing.

    Args:
        num_rows: the most requests of one step.
        num_tokens: that the KV cache holds.
    """
    base = write_base_config(SHAPE, root / "base", 4 * MAX_STEP_TOKENS)
    runner = build_runner(
        base,
        device="cpu",
        dtype="float32",
        arena_bytes=num_tokens * SHAPE.kv_bytes(1, 4) + (64 << 20),
        max_lora_rank=RANK,
        max_resident=2 * NUM_ADAPTERS,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        max_num_seqs=num_rows,
        load_format="dummy",
        overlap="on",
        executors=(InlineExecutor(), InlineExecutor()),
    )
    gpu, model = runner._batches.gpu, runner._model
    assert gpu is not None, "Triton computes nothing here"
    table = gpu.lora_batch(())
    kinds = gpu.graph_inputs(DECODE), gpu.graph_inputs(mixed_kind(MAX_STEP_TOKENS))
    gpu._graphs = [EmptySteps(model, kind, table, gpu._masks) for kind in kinds]
    for captured in gpu._graphs:
        captured.capture(GraphMemory(stream=None, pool=None))  # type: ignore[arg-type]
    runner._chooser.draws = TORCH_DRAWS
    runner._order = StepOrder("cuda", "on")  # steps are launched by the thread that plans
    model.forward = idle_forward  # type: ignore[method-assign]
    StepWork.list_groups = lambda self, num_rows: None  # type: ignore[method-assign]
    TritonAttentionMetadata._list_items = lambda self, begin, end: None  # type: ignore[method-assign]
    return runner


def idle_forward(batch: ForwardBatch) -> Tensor:
    """Hidden states without a forward pass."""
    return torch.zeros(len(batch.input_ids), SHAPE.hidden_size)


class HostEngine:
    """An engine over such a runner, and requests to fill it."""

    def __init__(self, root: Path, batch_size: int, context: int) -> None:
        num_tokens = (batch_size + 4) * (context + MAX_OUTPUT)
        config = EngineConfig(
            model_dir=str(root / "base"),
            device="cpu",
            dtype="float32",
            arena_bytes=0,
            max_lora_rank=RANK,
            max_resident=2 * NUM_ADAPTERS,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            max_num_seqs=batch_size,
        )
        self.engine = Engine(make_runner(root, batch_size, num_tokens), config, time.monotonic)
        self._digests = [f"sha256:{i:064x}" for i in range(NUM_ADAPTERS)]
        folder = write_adapter(
            SHAPE, root / "adapter", RANK, torch.float32, seed=1, targets=ATTENTION
        )
        self._numbers = itertools.count()
        self._running: list[str] = []
        self._rng = random.Random(1)
        self.step([AdapterFetched(digest, str(folder), RANK) for digest in self._digests])
        while len(self._running) < batch_size:
            self.step([self.new_request(context)])
        for _ in range(WARM_UP_STEPS + batch_size * context // MAX_STEP_TOKENS):
            self.step([])
        assert self.engine.scheduler.num_running == batch_size
        assert not self.engine.scheduler.queued_tokens > batch_size, "a prompt is not computed yet"

    def new_request(self, num_prompt: int) -> Submit:
        """The next request; its adapter is the next of all."""
        number = next(self._numbers)
        self._running.append(str(number))
        return Submit(
            request=WorkerRequest(
                request_id=str(number),
                prompt_ids=[self._rng.randrange(2, 128) for _ in range(num_prompt)],
                sampling=SamplingParams(max_tokens=MAX_OUTPUT, seed=number, ignore_eos=True),
                adapters=AdapterSet(((self._digests[number % NUM_ADAPTERS], 1.0),)),
            )
        )

    def leaving(self) -> list[Command]:
        """The request that has run longest is cancelled."""
        return [Cancel(self._running.pop(0))]

    def replaced(self) -> list[Command]:
        """One is cancelled and another comes."""
        return [*self.leaving(), self.new_request(NUM_NEW_PROMPT)]

    def step(self, commands: list[Command]) -> float:
        """Processor seconds of one step."""
        begin_s = time.process_time()
        msgspec.msgpack.encode(self.engine.step(commands))
        return time.process_time() - begin_s

    def median_ms(self, commands: Callable[[], list[Command]], num_steps: int) -> float:
        """Median milliseconds of steps, each with new commands."""
        gc.collect()
        gc.freeze()
        return 1e3 * statistics.median(self.step(commands()) for _ in range(num_steps))


def main() -> None:
    """Print a table and write `results/cpu/host_time.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind (40)")
    parser.add_argument("--out", type=Path, default=None, help="write results below this folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch_size, context in itertools.product(args.batch, args.context):
        with tempfile.TemporaryDirectory() as root:
            host = HostEngine(Path(root), batch_size, context)
            row = {"batch": batch_size, "context": context}
            row["steady_ms"] = host.median_ms(list, args.steps)
            row["mixed_ms"] = host.median_ms(host.replaced, args.steps)
            row["leaving_ms"] = host.median_ms(host.leaving, min(args.steps, batch_size // 8))
            rows.append(row)
    common.print_table(rows)
    if args.out is not None:
        common.write_results("host_time", torch.device("cpu"), {"steps": rows}, args.out)


if __name__ == "__main__":
    main()
