"""Decode steps of each family as programs of kernel calls and as layers in Python, in turns.

    python -m benchmarks run cpu.programs [--only qwen3.5,gpt-oss] [--rows 1,8] [--repetitions 5]

The bases and adapters are those of `cpu.families`: about half a billion random parameters, in
bfloat16. Both kinds of steps compute the same bits with the same kernels in one process. Prints the
processor time of a step, with the base alone and with an adapter for each request, and writes
`results/<machine>/cpu_programs.json`. Run it with OMP_NUM_THREADS=1 on a shared machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.families import FAMILIES, NATIVE, VOCAB_SIZE, make_files
from benchmarks.cpu.sides import OurEngine
from benchmarks.machine import write_results

NUM_PROMPT_TOKENS = 32
ARENA_BYTES = 1 << 30


def main() -> None:
    """Measure, print, write."""
    native = [name for name, family in FAMILIES.items() if family.model_impl == NATIVE]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(native), metavar="NAMES")
    parser.add_argument("--rows", default="1,8", help="requests of each case")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    lines = {}
    for name in args.only.split(","):
        gc.collect()
        with tempfile.TemporaryDirectory() as scratch:
            lines[name] = measured(name, Path(scratch), args)
        for case, line in lines[name].items():
            print(name, case, line, flush=True)
    facts = {"options": vars(args), "threads": torch.get_num_threads(), "load": os.getloadavg()}
    print(f"wrote {write_results('cpu_programs', {**facts, 'families': lines})}")


def measured(name: str, scratch: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Processor milliseconds of each case's steps of both kinds, and their ratio: medians."""
    sizes = [int(rows) for rows in args.rows.split(",")]
    base, adapters = make_files(FAMILIES[name], scratch, max(sizes))
    ours = OurEngine(base, "bfloat16", "auto", ARENA_BYTES)
    ours.load(adapters)
    for thread in threading.enumerate():
        if thread.name == "huge pages":  # its processor time would be counted
            thread.join()
    passes = {"programs": ours.model.pass_layers, "python": ours.model.forward_layers}
    found = {}
    for num_rows in sizes:
        for num_adapters in (0, num_rows):
            runs: dict[str, list[float]] = {kind: [] for kind in passes}
            for repetition in range(-1, args.repetitions):
                for kind, pass_layers in passes.items():
                    ours.model.pass_layers = pass_layers
                    step_ms = one_run(ours, num_rows, num_adapters, args.new_tokens)
                    if repetition >= 0:
                        runs[kind].append(step_ms)
            found[f"{num_rows} x {num_adapters}"] = summary(runs)
    return found


def one_run(ours: OurEngine, num_rows: int, num_adapters: int, num_tokens: int) -> float:
    """Processor milliseconds of the median step."""
    rng = random.Random(num_rows)
    prompts: list[list[int]] = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_rows)
    ]
    return ours.run(prompts, num_adapters, num_tokens).step_cpu_s * 1e3


def summary(runs: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and that of the ratios of runs next to each other."""
    ratios = [a / b for a, b in zip(runs["programs"], runs["python"], strict=True)]
    medians = {f"{kind}_ms": round(statistics.median(own), 2) for kind, own in runs.items()}
    return {**medians, "programs_over_python": round(statistics.median(ratios), 3)}


if __name__ == "__main__":
    main()
