"""Tokens a second with and without overlapping planning and steps.

    python -m benchmarks run gpu.overlap [--device cuda]

One engine with random weights decodes a full batch, half of it seeded draws, alternately with steps
one by one and overlapped; prints tokens a second of both, their ratio, and on a GPU the share of
time in which a kernel runs (`torch.profiler`). Loads no file but a config.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import cpu_model
from benchmarks.gpu import common
from benchmarks.gpu.common import SHAPES
from benchmarks.machine import write_results
from loraplex.api.request import WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.messages import Cancel, EngineConfig, Submit

NUM_PROMPT = 64
WARM_UP_STEPS = 8
NUM_TURNS = 5
PROFILED_STEPS = 30


@dataclass(frozen=True)
class Result:
    """Medians over the turns."""

    batch_size: int
    tokens_per_s_off: float
    tokens_per_s_on: float
    busy_off: float | None = None
    """Share of the time in which some kernel runs; None without a GPU."""
    busy_on: float | None = None

    @property
    def ratio(self) -> float:
        """On over off."""
        return self.tokens_per_s_on / self.tokens_per_s_off


class OneByOne:
    """A runner whose steps the engine does not overlap."""

    overlaps = False

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Side:
    """An engine that overlaps, or not."""

    def __init__(self, base: Path, args: argparse.Namespace, runner: Any) -> None:
        config = EngineConfig(
            model_dir=str(base),
            device=args.device,
            dtype="auto",
            arena_bytes=args.arena_bytes,
            load_format="dummy",
            max_lora_rank=16,
            max_resident=16,
            max_num_batched_tokens=2048,
            max_num_seqs=512,
        )
        self.is_gpu = runner.model_info().device == "cuda"
        self._engine = Engine(runner, config, time.monotonic)
        self._num_sent = 0

    def begin(self, batch_size: int, num_tokens: int) -> None:
        """A batch of requests that all decode."""
        commands = [self._submit(num_tokens) for _ in range(batch_size)]
        self._engine.step(commands)
        while self._engine.scheduler.queued_tokens > batch_size:
            self._engine.step([])
        self.steps(WARM_UP_STEPS)

    def steps(self, count: int) -> float:
        """Seconds of that many steps."""
        begin_s = time.perf_counter()
        for _ in range(count):
            assert self._engine.step([]).tokens
        return time.perf_counter() - begin_s

    def busy(self, count: int) -> float | None:
        """Share of that many steps in which a kernel runs."""
        if not self.is_gpu:
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            elapsed_s = self.steps(count)
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type.name == "CUDA"
        )
        busy_us, last = 0.0, 0.0
        for begin, end in spans:
            busy_us += max(0.0, end - max(begin, last))
            last = max(last, end)
        return busy_us / 1e6 / elapsed_s

    def cancel(self) -> None:
        """End all requests, and the step in flight."""
        self._engine.step([Cancel(str(number + 1)) for number in range(self._num_sent)])
        while self._engine.has_requests:
            self._engine.step([])

    def _submit(self, num_tokens: int) -> Submit:
        self._num_sent += 1
        name = self._num_sent
        return Submit(
            request=WorkerRequest(
                request_id=str(name),
                prompt_ids=[(name * 31 + i) % 100 + 2 for i in range(NUM_PROMPT)],
                sampling=SamplingParams(
                    num_tokens, seed=name, ignore_eos=True, temperature=0.8 * (name % 2)
                ),
            )
        )


def make_sides(base: Path, args: argparse.Namespace) -> tuple[Side, Side]:
    """Off and on. On a GPU both use one runner, and so the same blocks: what they hold is noise."""
    settings = {"device": args.device, "arena_bytes": args.arena_bytes, "load_format": "dummy"}
    settings |= {"max_lora_rank": 16, "max_resident": 16}
    overlapping = build_runner(base, overlap="on", **settings)
    if args.device == "cuda":
        return Side(base, args, OneByOne(overlapping)), Side(base, args, overlapping)
    return Side(base, args, build_runner(base, **settings)), Side(base, args, overlapping)


def measure(sides: tuple[Side, Side], batch_size: int, num_steps: int) -> Result:
    """Both sides alternately; one is empty while the other runs, as they share threads or
    blocks."""
    num_tokens = WARM_UP_STEPS + num_steps + PROFILED_STEPS + 16
    rates: tuple[list[float], list[float]] = ([], [])
    busy: list[float | None] = [None, None]
    for turn in range(NUM_TURNS):
        for i, side in enumerate(sides):
            side.begin(batch_size, num_tokens)
            rates[i].append(batch_size * num_steps / side.steps(num_steps))
            if turn == NUM_TURNS - 1:
                busy[i] = side.busy(PROFILED_STEPS)
            side.cancel()
    return Result(batch_size, *map(statistics.median, rates), *busy)


def main() -> None:
    """Print a table; write `results/<machine>/overlap.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of the base (135m on a CPU)")
    parser.add_argument("--batch", default="1,16,64", help="batch sizes (1,16,64)")
    parser.add_argument("--steps", type=int, default=20, help="steps a turn (20)")
    parser.add_argument("--arena-bytes", type=int, default=2 << 30, help="arena of each side")
    parser.add_argument("--out", type=Path, help="folder for the results of a GPU")
    args = parser.parse_args()
    shape = SHAPES[args.shape] if args.shape else cpu_model.SHAPES["135m"]
    results = []
    with tempfile.TemporaryDirectory() as root:
        base = common.write_base(shape, Path(root) / "base", 4096)
        sides = make_sides(base, args)
        print(f"{'batch':>6} {'off tok/s':>10} {'on tok/s':>10} {'on / off':>9}  busy off, on")
        for batch_size in map(int, args.batch.split(",")):
            result = measure(sides, batch_size, args.steps)
            busy = [f"{share:.3f}" for share in (result.busy_off, result.busy_on) if share]
            print(
                f"{batch_size:>6} {result.tokens_per_s_off:>10.1f} {result.tokens_per_s_on:>10.1f}"
                f" {result.ratio:>9.3f}  {', '.join(busy)}"
            )
            results.append(asdict(result) | {"ratio": result.ratio})
    table = {"shape": shape.name, "rows": results}
    if args.out is None:
        print(write_results("overlap", table))
    else:
        print(common.write_results("overlap", torch.device(args.device), table, args.out))


if __name__ == "__main__":
    main()
