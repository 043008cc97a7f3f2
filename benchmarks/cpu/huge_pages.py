"""Decode steps with weights and arena in huge pages and in small ones, in turns.

    python -m benchmarks run cpu.huge_pages --work-dir DIR [--model 500m] [--repetitions 5]

Each measurement is a process of its own. Small pages are those of a process for which Linux has
been asked not to use huge ones (`PR_SET_THP_DISABLE`). A process measures after its weights have
been moved, and reports how much of its memory is in huge pages. Prints each step and the ratio of
the medians, and writes `results/<machine>/cpu_huge_pages.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.cpu.sides import OurEngine
from benchmarks.cpu_model import SHAPES, make_adapter, make_base, make_prompts
from benchmarks.machine import write_results

ARENA_BYTES = 1_000_000_000
PR_SET_THP_DISABLE = 41
ROLES = ("small", "huge")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=tuple(SHAPES), default="500m")
    parser.add_argument("--work-dir", type=Path, required=True, help="keep models here")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cases", default="1x0,8x0,8x8", help="requests x adapters")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        print(json.dumps(steps_ms(args)))
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    prepare(args)
    runs: dict[str, list[dict[str, float]]] = {role: [] for role in ROLES}
    for turn in range(args.repetitions):
        for role in ROLES if turn % 2 == 0 else reversed(ROLES):
            runs[role].append(child(role))
            print(role, runs[role][-1], flush=True)
    table = {}
    for case in args.cases.split(","):
        small, huge = (statistics.median(run[case] for run in runs[role]) for role in ROLES)
        table[case] = {
            "small_ms": small,
            "huge_ms": huge,
            "small_over_huge": round(small / huge, 3),
        }
        print(f"{case}: {small:.2f} ms in small pages, {huge:.2f} ms in huge ones")
    options = {"model": args.model, "repetitions": args.repetitions}
    write_results("cpu_huge_pages", {"options": options, "table": table, "runs": runs})


def prepare(args: argparse.Namespace) -> tuple[Path, list[Path]]:
    """The base and the adapters of all cases."""
    shape = SHAPES[args.model]
    num_adapters = max(int(case.split("x")[1]) for case in args.cases.split(","))
    folders = [make_adapter(shape, args.work_dir, i) for i in range(num_adapters)]
    return make_base(shape, args.work_dir), folders


def child(role: str) -> dict[str, float]:
    """What this script says in a fresh process, as `role`."""
    command = [sys.executable, "-m", "benchmarks.cpu.huge_pages", *sys.argv[1:], "--role", role]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def steps_ms(args: argparse.Namespace) -> dict[str, Any]:
    """The median step of each case, and megabytes in huge pages."""
    if args.role == "small" and ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        raise SystemExit("this system cannot turn huge pages off for a process")
    base, folders = prepare(args)
    ours = OurEngine(base, "auto", "auto", ARENA_BYTES)
    ours.touch()
    ours.load(folders)
    for thread in threading.enumerate():
        if thread.name == "huge pages":
            thread.join()
    found: dict[str, Any] = {}
    for case in args.cases.split(","):
        count, num_adapters = map(int, case.split("x"))
        prompts = make_prompts(count, SHAPES[args.model].vocab_size, seed=0)
        ours.run(prompts, num_adapters, args.new_tokens)
        step_s = ours.run(prompts, num_adapters, args.new_tokens).step_s
        found[case] = round(step_s * 1e3, 2)
    rollup = Path("/proc/self/smaps_rollup").read_text()
    huge = re.search(r"AnonHugePages:\s+(\d+) kB", rollup)
    return {**found, "huge_mb": int(huge[1]) // 1024 if huge else 0}


if __name__ == "__main__":
    main()
