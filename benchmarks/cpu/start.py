"""Time from process start to ready, and resident memory, of an engine.

    python -m benchmarks run cpu.start --work-dir DIR [--model 135m] [--adapters 32]

Starts one fresh process that only imports torch, and three, one after another, that load the base
(with compiled kernels), then all adapters, and decode a batch with each of them. Prints the median
of the seconds from the start of a process until it could take requests, and the resident memory
beyond that of torch, relative to the bytes of base and adapters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import SUPPRESS, Namespace
from typing import Any

import psutil

from benchmarks.cpu_model import (
    SHAPES,
    base_options,
    make_adapter,
    make_base,
    make_prompts,
    rank_of,
)
from benchmarks.machine import write_results
from loraplex_services.worker.native.build import build_library
from loraplex_services.worker.native.isa import TORCH, choose_isa

ARENA_BYTES = 2_000_000_000
NUM_TOKENS = 8
NUM_STARTS = 3
CHILD = """
import gc, runpy
gc.disable()  # as in an engine's process
runpy.run_module("benchmarks.cpu.start", run_name="__main__", alter_sys=True)
"""


def main() -> None:
    """Measure, print, write."""
    parser = base_options(__doc__)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--role", choices=("torch", "engine"), help=SUPPRESS)
    parser.add_argument("--begun-s", type=float, help=SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        print(json.dumps(bare_torch() if args.role == "torch" else engine(args)))
        return
    shape = SHAPES[args.model]
    make_base(shape, args.work_dir)
    for adapter in range(args.adapters):
        make_adapter(shape, args.work_dir, adapter)
    if (isa := choose_isa("auto")) != TORCH:
        build_library(isa)
    bare, *starts = child("torch"), *(child("engine") for _ in range(NUM_STARTS))
    full = sorted(starts, key=lambda start: start["start_s"])[NUM_STARTS // 2]
    adapter_bytes = sum(2 * shape.num_adapter_weights(rank_of(i)) for i in range(args.adapters))
    held_bytes = 2 * shape.num_weights + adapter_bytes
    table = {
        "start_s": round(full["start_s"], 2),
        "rss_over_torch_bytes": full["rss_bytes"] - bare["rss_bytes"],
        "base_and_adapter_bytes": held_bytes,
        "rss_over_held": round((full["rss_bytes"] - bare["rss_bytes"]) / held_bytes, 3),
    }
    print(table)
    write_results("cpu_start", {"isa": isa, "dtype": full["dtype"], "table": table}, args)


def child(role: str) -> dict[str, Any]:
    """What this script says in a fresh process, as `role`. The process keeps bytecode, as installed
    packages have it."""
    hidden = "--role", role, "--begun-s", str(time.monotonic())
    command = [sys.executable, "-c", CHILD, *sys.argv[1:], *hidden]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def bare_torch() -> dict[str, Any]:
    """Memory of a process that imports torch and adds two numbers."""
    import torch

    torch.ones(2).sum()
    return {"rss_bytes": psutil.Process().memory_info().rss}


def engine(args: Namespace) -> dict[str, Any]:
    """Load everything and decode once."""
    from benchmarks.cpu.sides import OurEngine

    ours = OurEngine(args.work_dir / args.model, "auto", "auto", ARENA_BYTES)
    start_s = time.monotonic() - args.begun_s
    shape = SHAPES[args.model]
    ours.load([make_adapter(shape, args.work_dir, i) for i in range(args.adapters)])
    ours.run(make_prompts(args.adapters, shape.vocab_size, 0), args.adapters, NUM_TOKENS)
    rss_bytes = psutil.Process().memory_info().rss
    return {"rss_bytes": rss_bytes, "start_s": start_s, "dtype": ours.dtype}


if __name__ == "__main__":
    main()
