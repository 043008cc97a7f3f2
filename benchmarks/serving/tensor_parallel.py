"""Throughput of two ranks with and without the communication of adapters (S-LoRA's Figure 8).

    python -m benchmarks run serving.tensor_parallel --work-dir DIR

Two ranks on the two cores of one machine share a base of 110M parameters in bfloat16 and
communicate by gloo. 16 requests for 8 adapters of rank 16 on q, k, v and o decode together, with
one matrix of each pair divided (the default in bfloat16, which sends nothing) and with both divided
(`--fully-sharded-loras`, S-LoRA's division), and without adapters. Rounds alternate between the
groups. Prints medians of tokens per second and per second of both ranks' processor time.
`tests/worker/runner/parallel/test_group.py` counts the bytes.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import psutil
import torch

from benchmarks.cpu_model import make_base, make_prompts
from benchmarks.llama import ATTENTION, Shape, write_adapter
from benchmarks.machine import options_of, write_results
from loraplex.cli.output import print_table
from loraplex_services.worker.runner.building import build_runner
from tests.worker.parity.driving import Driver, Job, greedy

SHAPE = Shape("110m", 49152, 512, 1536, 30, 8, 2)
RANK, NUM_ADAPTERS, NUM_REQUESTS = 16, 8, 16
SIDES = ("one matrix divided", "both matrices divided")


class Group:
    """Two ranks with their adapters loaded."""

    def __init__(self, base: Path, folders: list[Path], *, fully_sharded: bool) -> None:
        self.runner = build_runner(
            base,
            device="cpu",
            dtype="bfloat16",
            arena_bytes=256 << 20,
            num_ranks=2,
            fully_sharded_loras=fully_sharded,
        )
        self._driver = Driver(self.runner)
        for slot, folder in enumerate(folders):
            self._driver.load(slot, folder)
        self._num_runs = 0

    def run(self, num_adapters: int, num_tokens: int) -> tuple[float, float]:
        """Tokens per second, and per processor second of both ranks."""
        self._num_runs += 1
        prompts = make_prompts(NUM_REQUESTS, SHAPE.vocab_size, seed=self._num_runs)
        jobs = [
            Job(
                greedy(f"{self._num_runs}-{i}", prompt, num_tokens),
                ((i % num_adapters, 1.0),) if num_adapters else (),
            )
            for i, prompt in enumerate(prompts)
        ]
        cpu_s, begin_s = self._cpu_s(), time.perf_counter()
        self._driver.run(jobs)
        elapsed_s, cpu_s = time.perf_counter() - begin_s, self._cpu_s() - cpu_s
        num_generated = num_tokens * NUM_REQUESTS
        return num_generated / elapsed_s, num_generated / cpu_s

    def _cpu_s(self) -> float:
        """Processor seconds of this process and of the other rank."""
        assert self.runner._followers is not None
        others = [psutil.Process(rank.process.pid) for rank in self.runner._followers._all]
        times = [process.cpu_times() for process in (psutil.Process(), *others)]
        return sum(each.user + each.system for each in times)


def measure(work_dir: Path, num_rounds: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, by side; `base` is that of the default group."""
    base = make_base(SHAPE, work_dir)
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in ("base", *SIDES)}
    groups = {}
    for side in SIDES:
        # Images of both divisions have different names, so both groups may use the same folders.
        folders = [
            write_adapter(
                SHAPE,
                work_dir / f"attention-{number}",
                RANK,
                torch.bfloat16,
                seed=number,
                targets=ATTENTION,
            )
            for number in range(NUM_ADAPTERS)
        ]
        groups[side] = Group(base, folders, fully_sharded=side == SIDES[1])
        groups[side].run(NUM_ADAPTERS, 4)  # warms up
    for _ in range(num_rounds):
        found["base"].append(groups[SIDES[0]].run(0, num_tokens))
        for side in SIDES:
            found[side].append(groups[side].run(NUM_ADAPTERS, num_tokens))
    for group in groups.values():
        group.runner.close()
    names = ("tokens_per_s", "tokens_per_cpu_s")
    return {
        side: {name: statistics.median(run[i] for run in runs) for i, name in enumerate(names)}
        for side, runs in found.items()
    }


def main() -> None:
    """Measure, print, write `results/<machine>/tensor_parallel.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    sides = measure(args.work_dir, args.rounds, args.tokens)
    rows = [
        [side, *(f"{value:.1f}" for value in values.values())] for side, values in sides.items()
    ]
    print_table(["ADAPTERS", "TOKENS/S", "TOKENS/CPU S"], rows)
    write_results("tensor_parallel", {"sides": sides}, args)


if __name__ == "__main__":
    main()
