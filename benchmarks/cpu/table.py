"""The goals for CPUs, and what this machine reaches at each instruction set that it has.

    python -m benchmarks run cpu.table --work-dir DIR [--peers PEERS] [--levels avx512_bf16,avx2]

For each level, `cpu.decode` runs in a process of its own; a level below the machine's best one is
forced, also for the libraries below transformers and PEFT, and for vLLM. With PEERS (where
`benchmarks/cpu/install_peers.sh` put vLLM's CPU build), `cpu.peers` runs, too. At the 135M
geometry, a level takes about eight minutes on two idle cores. Prints each goal with what was
reached, or why it was not measured, and writes `results/<machine>/cpu_table.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cpu_model import dtype_of, engine_options, peer_dtype_of
from benchmarks.machine import cpu_facts, machine_kind, write_results
from loraplex_services.worker.native.isa import host_isas
from loraplex_services.worker.scheduling.limits import MAX_STEP_S

PEER_LIMITS = {
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "neon": {},
}
"""Variables that keep oneDNN, torch and MKL at a level on processors that have more. On aarch64,
they use bfloat16 instructions for bfloat16 only."""
LOADS, START = "loads", "start"
"""Cases of figures that belong to no batch."""

Rows = list[dict[str, Any]]


class Goal(NamedTuple):
    """One line of the table: a figure of another benchmark, and the limits it must keep.

    Plain AVX-512 has no goals of its own.
    """

    title: str
    benchmark: str
    case: str
    column: str
    is_least: bool
    """Whether larger is better."""
    amx: float
    avx512_bf16: float
    avx2: float

    def limit(self, level: str) -> float | None:
        """The limit at a level; None if there is none."""
        found: float | None = getattr(self, level, None)
        return found


GOALS = (
    Goal("base over vLLM's, 8 requests", "peers", "8x0", "speed_over_peer", True, 1.2, 1.1, 0.9),
    Goal("base over vLLM's, 32 requests", "peers", "32x0", "speed_over_peer", True, 1.2, 1.1, 0.9),
    Goal("32 x 32 over PEFT's", "decode", "32x32", "speed_over_peft", True, 12, 8, 5),
    Goal("8 x 8 over PEFT's", "decode", "8x8", "speed_over_peft", True, 8, 6, 4),
    Goal(
        "first token over PEFT's, 32 x 32",
        "decode",
        "32x32",
        "first_token_over_peft",
        False,
        0.1,
        0.2,
        0.3,
    ),
    Goal("step over floor, 8 x 8", "decode", "8x8", "step_over_floor", False, 1.6, 1.8, 2),
    Goal("step over floor, 32 x 32", "decode", "32x32", "step_over_floor", False, 2.5, 2.5, 2.5),
    Goal("step over the base's, 32 x 1", "decode", "32x1", "step_over_base", False, *[1.05] * 3),
    Goal("step over the base's, 32 x 8", "decode", "32x8", "step_over_base", False, *[1.25] * 3),
    Goal("step over the base's, 32 x 32", "decode", "32x32", "step_over_base", False, *[1.8] * 3),
    Goal("adapter load, median ms", "decode", LOADS, "loraplex", False, *[10] * 3),
    Goal("start to ready, s", "start", START, "start_s", False, *[2] * 3),
)


def main() -> None:
    """Measure each level, print the table, write it."""
    args = parse_args()
    levels = args.levels.split(",") if args.levels else host_isas()
    table: list[dict[str, Any]] = []
    rows: dict[str, dict[str, Rows]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for level in levels:
            results = Path(scratch) / level
            measured = {"decode": run_decode(args, level, results)}
            if level == host_isas()[0]:
                measured["start"] = run_start(args, results)
            if args.peers:
                measured["peers"] = run_peers(args, level, results)
            table += [line(goal, level, measured.get(goal.benchmark)) for goal in GOALS]
            rows[level] = measured
    print_table(table)
    name = "cpu_table" if args.model == "135m" else f"cpu_table_{args.model}"
    write_results(name, {"table": table, "rows": rows}, args)


def run_decode(args: Namespace, level: str, results: Path) -> Rows:
    """The rows of `cpu.decode` at one level."""
    options = [*at_level(level), "--peer-dtype", peer_dtype_of(level), *counts(args)]
    options += ["--max-step-s", str(args.max_step_s)]
    found = run("decode", args, options, limits_of(level), results)
    return [*found["table"], {"case": LOADS, **found["load_ms"]}]


def run_peers(args: Namespace, level: str, results: Path) -> Rows:
    """The rows of `cpu.peers` for the base, which vLLM serves at a speed that can be compared."""
    options = ["--peers", str(args.peers), "--peer-dtype", peer_dtype_of(level), "--only", "vllm"]
    options += ["--cases", "8x0,32x0", *counts(args)]
    found = run("peers", args, [*at_level(level), *options], limits_of(level), results)
    rows: Rows = found["table"]
    return rows


def run_start(args: Namespace, results: Path) -> Rows:
    """The results of `cpu.start`."""
    return [{"case": START, **run("start", args, [], {}, results)["table"]}]


def at_level(level: str) -> list[str]:
    """Options that make a benchmark run at a level."""
    return ["--cpu-isa", level, "--dtype", dtype_of(level)]


def limits_of(level: str) -> dict[str, str]:
    """Environment variables that keep the libraries of peers at a level."""
    return {} if level == host_isas()[0] else PEER_LIMITS[level]


def counts(args: Namespace) -> list[str]:
    """How much to measure."""
    return ["--repetitions", str(args.repetitions), "--new-tokens", str(args.new_tokens)]


def run(
    benchmark: str,
    args: Namespace,
    options: list[str],
    environ: dict[str, str],
    results: Path,
) -> dict[str, Any]:
    """Run a benchmark and return its results, which are written into a folder of their own.

    Raises:
        subprocess.CalledProcessError: when it fails; its messages are on the terminal.
    """
    options = ["--model", args.model, "--work-dir", str(args.work_dir), *options]
    print(f"== cpu.{benchmark}", *options, flush=True)
    subprocess.run(
        [sys.executable, "-m", f"benchmarks.cpu.{benchmark}", *options],
        env={**os.environ, **environ, "BENCHMARK_RESULTS": str(results)},
        check=True,
    )
    path = results / machine_kind(cpu_facts()) / f"cpu_{benchmark}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def line(goal: Goal, level: str, rows: Rows | None) -> dict[str, Any]:
    """One goal at one level; `rows` is None where the benchmark did not run."""
    found = next((row for row in rows or () if row["case"] == goal.case), {})
    value, limit = found.get(goal.column), goal.limit(level)
    entry = {"level": level, "ratio": goal.title, "goal": limit, "reached": value}
    if value is None:
        entry["not_measured"] = why_not(goal, level)
    elif limit is not None:
        entry["is_met"] = value >= limit if goal.is_least else value <= limit
    return entry


def why_not(goal: Goal, level: str) -> str:
    """Why there is no figure."""
    if goal.benchmark == "peers":
        return "no --peers"
    return "see the messages above" if level == host_isas()[0] else "best level only"


def print_table(table: list[dict[str, Any]]) -> None:
    """One line a ratio, one column a level."""
    levels = list(dict.fromkeys(entry["level"] for entry in table))
    print(f"| ratio | {' | '.join(levels)} |\n|{'---|' * (len(levels) + 1)}")
    for goal in GOALS:
        cells = [e for e in table if e["ratio"] == goal.title]
        print(f"| {goal.title} | {' | '.join(cell(e, goal.is_least) for e in cells)} |")


def cell(entry: dict[str, Any], is_least: bool) -> str:
    """The figure and the goal, or why there is no figure."""
    if entry["reached"] is None:
        return f"not measured ({entry['not_measured']})"
    if entry["goal"] is None:
        return f"{entry['reached']:.2f}"
    sign = ">=" if is_least else "<="
    verdict = "" if entry["is_met"] else ", missed"
    return f"{entry['reached']:.2f} ({sign} {entry['goal']:g}{verdict})"


def parse_args() -> Namespace:
    """Options."""
    parser = engine_options(__doc__)
    parser.add_argument("--peers", type=Path, help="where install_peers.sh put vLLM")
    parser.add_argument("--levels", help=f"of {', '.join(host_isas())}; all by default")
    parser.add_argument("--max-step-s", type=float, default=MAX_STEP_S, help="see cpu.decode")
    return parser.parse_args()


if __name__ == "__main__":
    main()
