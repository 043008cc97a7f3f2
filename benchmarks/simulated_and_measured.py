"""What the simulator says of a trace, beside what a stack did with it.

    OMP_NUM_THREADS=1 python -m benchmarks.simulated_and_measured --work-dir DIR [--rates 10,20,30]

`loraplex up` serves the demo's base and a hundred copies of its adapters, and writes a step trace;
the engine computes with one thread, so that gateway, doors and clients have a core of their own.
`loraplex bench trace` first fetches the adapters, then sends a bursty trace, on which the costs of
steps and copies are fitted, and an even one, whose median time outside the worker is added to every
request; then, for each rate, a trace of another seed. The simulator plays the same traces one after
the other. Printed: simulated over measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write_results
from demo.stack import Stack, running_stack
from loraplex.adapter_format import CONFIG_FILE
from loraplex.adapter_variants import source_folders
from loraplex.cli.output import print_table
from loraplex.workload import (
    Outcome,
    Summary,
    UniformLengths,
    Workload,
    generate,
    ranks_of,
    summarize,
)
from services.simulate.costs import Costs
from services.simulate.fitting import fit_trace
from services.simulate.flags import fleet_of, make_parser
from services.simulate.simulation import Simulation

DEMO = Path(__file__).parents[1] / "demo"
ARENA_BYTES = 64 << 20
LENGTHS = UniformLengths((8, 128), (8, 64))
NUM_ADAPTERS = 100
FIT_CV = 4.0
"""Bursts, so that the run on which costs are fitted has steps of every size."""
PAUSE_S = 60.0
"""Between traces, in virtual time."""
FIGURES = (
    ("requests/s", ("requests_per_s",)),
    ("first token mean", ("first_token", "mean_s")),
    ("first token p50", ("first_token", "p50_s")),
    ("first token p90", ("first_token", "p90_s")),
    ("per token p50", ("per_token", "p50_s")),
    ("whole request mean", ("latency", "mean_s")),
    ("whole request p50", ("latency", "p50_s")),
)


def loraplex(*arguments: str) -> Any:
    """What a command prints with `--json`."""
    command = [sys.executable, "-m", "loraplex.cli.loraplex", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def flags(workload: Workload) -> list[str]:
    """Of `bench trace`."""
    (in_min, in_max), (out_min, out_max) = LENGTHS.inputs, LENGTHS.outputs
    return [
        *("--adapters", str(workload.num_adapters), "--alpha", str(workload.alpha)),
        *("--rate", str(workload.rate_per_s), "--duration", str(workload.duration_s)),
        *("--cv", str(workload.cv), "--seed", str(workload.seed)),
        *("--lengths", f"{in_min}-{in_max},{out_min}-{out_max}"),
    ]


def figure(summary: dict[str, Any], keys: tuple[str, ...]) -> float:
    """One number of a summary."""
    for key in keys:
        summary = summary[key]
    assert isinstance(summary, float), keys
    return summary


def measure(stack: Stack, workloads: Sequence[Workload], steps: Path, part: Path) -> list[Any]:
    """Every workload through the stack; the steps of the second go to `part`."""
    publish = ("--registry", stack.registry, "--prepare-from", str(DEMO / "adapters"))
    runs, ends = [], []
    for place, workload in enumerate(workloads):
        send = ("bench", "trace", "--gateway", stack.grpc, *flags(workload))
        runs.append(loraplex(*send, *(() if place else publish)))
        ends.append(steps.stat().st_size)
    lines = steps.read_bytes()
    part.write_bytes(lines[: lines.index(b"\n") + 1] + lines[ends[0] : ends[1]])
    return runs


def simulate(costs: Costs, workloads: Sequence[Workload]) -> list[Summary]:
    """Every workload after the other through one simulated worker."""
    settings = ["--costs", "fitted", "--on-disk"]
    fleet = fleet_of(make_parser().parse_args(settings), costs, ARENA_BYTES)
    configs = [folder / CONFIG_FILE for folder in source_folders(DEMO / "adapters")]
    mix = [json.loads(path.read_bytes())["r"] for path in configs]
    begins_s = [0.0]
    for workload in workloads:
        begins_s.append(begins_s[-1] + workload.duration_s + PAUSE_S)
    traces = [
        [dataclasses.replace(r, arrival_s=r.arrival_s + begin_s) for r in generate(workload)]
        for workload, begin_s in zip(workloads, begins_s, strict=False)
    ]
    simulation = Simulation(fleet, ranks_of(mix, NUM_ADAPTERS))
    outcomes = iter(simulation.run([request for trace in traces for request in trace]))
    return [
        summarize([since(next(outcomes), begin_s) for _ in trace])
        for trace, begin_s in zip(traces, begins_s, strict=False)
    ]


def since(outcome: Outcome, begin_s: float) -> Outcome:
    """In seconds since `begin_s`."""
    assert outcome.first_token_s is not None, outcome.reason
    return dataclasses.replace(
        outcome,
        arrival_s=outcome.arrival_s - begin_s,
        first_token_s=outcome.first_token_s - begin_s,
        end_s=outcome.end_s - begin_s,
    )


def main() -> None:
    """Measure, simulate, print, write `results/<machine>/simulated_and_measured.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for state and step trace")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each trace (20)")
    parser.add_argument("--fit-rate", type=float, default=20.0)
    parser.add_argument("--rates", default="10,20,30")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    steps, part = args.work_dir / "steps.jsonl", args.work_dir / "fitted.jsonl"
    steps.unlink(missing_ok=True)
    rates = [float(text) for text in args.rates.split(",")]
    usual = Workload(NUM_ADAPTERS, args.fit_rate, args.seconds, alpha=0.5, lengths=LENGTHS)
    workloads = [
        dataclasses.replace(usual, alpha=1.0),  # asks for every adapter
        dataclasses.replace(usual, seed=1, cv=FIT_CV),
        dataclasses.replace(usual, seed=2),
        *(dataclasses.replace(usual, seed=3 + i, rate_per_s=r) for i, r in enumerate(rates)),
    ]
    settings = {"LORAPLEX_STEP_TRACE": str(steps), "LORAPLEX_KV_MEMORY": str(ARENA_BYTES)}
    with running_stack(DEMO / "base", "loraplex-demo", args.work_dir / "state", settings) as stack:
        measured = measure(stack, workloads, steps, part)
    fitted = fit_trace(part)
    costs = dataclasses.replace(fitted.costs, request_s=measured[2]["outside"]["p50_s"])
    print(f"fitted {fitted.num_steps} steps, R^2 {fitted.explained:.3f}; simulated over measured:")
    rows, runs = [], []
    simulated = [dataclasses.asdict(summary) for summary in simulate(costs, workloads)]
    names = ["first", "bursts", "even", *(f"{rate:g}" for rate in rates)]
    for name, said, seen in zip(names, simulated, measured, strict=True):
        ratios = {label: figure(said, keys) / figure(seen, keys) for label, keys in FIGURES}
        rows.append([name, *(f"{ratio:.2f}" for ratio in ratios.values())])
        runs.append({"run": name, "ratios": ratios, "simulated": said, "measured": seen})
    print_table(["RATE", *(label.upper() for label, _ in FIGURES)], rows)
    results = {"fit_rate": args.fit_rate, "costs": dataclasses.asdict(costs), "runs": runs}
    print(f"wrote {write_results('simulated_and_measured', results)}")


if __name__ == "__main__":
    main()
