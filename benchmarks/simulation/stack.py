"""Simulated results of a whole stack, compared with measured ones.

    OMP_NUM_THREADS=1 python -m benchmarks run simulation.stack --work-dir DIR [--rates 10,80]

`loraplex up` serves the demo's base and a hundred copies of its adapters, and writes a step trace.
The engine computes with one thread, so that the gateway, the API server process and the clients
have a core of their own. Every adapter is requested once, so that the worker has it. Then `loraplex
bench trace` plays short traces in rounds: a bursty one, an even one and one with more requests than
the worker can serve, on which the costs of steps and copies are fitted; and one for each rate that
is predicted, with a seed of its own. The even one says how long requests spend outside the worker.
Runs of one kind are pooled over the rounds, so that changes of the machine's speed affect both
sides of the comparison. The simulator, with the gateway's admission before the worker, plays the
same traces one after the other. Prints simulated over measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import options_of, write_results
from demo.stack import Stack, running_stack
from loraplex.adapter_format import CONFIG_FILE
from loraplex.cli.output import print_table
from loraplex.client.inference_client import InferenceClient
from loraplex.client.registry_client import RegistryClient
from loraplex.workload import (
    RequestOutcome,
    Summary,
    TracedRequest,
    UniformLengths,
    Workload,
    generate,
    ranks_of,
    summarize,
)
from loraplex.workload.adapter_variants import NAME_PREFIX, publish_variants, source_folders
from loraplex.workload.driving import drive, targets
from loraplex_services.simulate.costs import Costs
from loraplex_services.simulate.fitting import fit_trace
from loraplex_services.simulate.flags import fleet_of, make_parser
from loraplex_services.simulate.simulation import Simulation

DEMO = Path(__file__).parents[2] / "demo"
ARENA_BYTES = 64 << 20
LENGTHS = UniformLengths((8, 128), (8, 64))
NUM_ADAPTERS = 100
BURSTS, EVEN, CROWD = "bursts", "even", "crowd"
"""Names of the traces on which costs are fitted."""
FIRST = [TracedRequest(index / 20.0, index, 16, 4) for index in range(NUM_ADAPTERS)]
"""A trace that asks for every adapter once."""
FIT_CV = 4.0
"""Bursts, so that the runs on which costs are fitted have steps of every size."""
PAUSE_S = 1.0
"""Between a trace's end and the next one, in virtual time: `bench trace` takes about so long to
start. Longer ones would let adapters be forgotten that the worker still holds."""
FIGURES = (
    ("requests/s", ("requests_per_s",)),
    ("first token mean", ("first_token", "mean_s")),
    ("first token p50", ("first_token", "p50_s")),
    ("first token p90", ("first_token", "p90_s")),
    ("per token mean", ("per_token", "mean_s")),
    ("per token p50", ("per_token", "p50_s")),
    ("whole request mean", ("latency", "mean_s")),
    ("whole request p50", ("latency", "p50_s")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A trace and the outcomes of its requests."""

    name: str
    workload: Workload
    outcomes: Sequence[RequestOutcome] = ()


def loraplex(*arguments: str) -> None:
    """Run a command."""
    command = [sys.executable, "-m", "loraplex.cli.loraplex", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def flags(workload: Workload) -> list[str]:
    """The flags of `bench trace`."""
    (in_min, in_max), (out_min, out_max) = LENGTHS.inputs, LENGTHS.outputs
    return [
        *("--adapters", str(workload.num_adapters), "--alpha", str(workload.alpha)),
        *("--rate", str(workload.rate_per_s), "--duration", str(workload.duration_s)),
        *("--cv", str(workload.cv), "--seed", str(workload.seed)),
        *("--lengths", f"{in_min}-{in_max},{out_min}-{out_max}"),
    ]


def planned(args: Namespace) -> list[Run]:
    """What is played, in its order."""
    usual = Workload(NUM_ADAPTERS, args.fit_rate, args.seconds, alpha=0.5, lengths=LENGTHS)
    bursts = Run(BURSTS, dataclasses.replace(usual, cv=FIT_CV))
    rates = [Run(r, dataclasses.replace(usual, rate_per_s=float(r))) for r in args.rates.split(",")]
    crowd = Run(CROWD, dataclasses.replace(usual, rate_per_s=args.crowd_rate))
    runs = [bursts, Run(EVEN, usual), *rates, crowd] * args.rounds
    return [
        dataclasses.replace(run, workload=dataclasses.replace(run.workload, seed=seed))
        for seed, run in enumerate(runs)
    ]


async def ask_for_all(stack: Stack) -> None:
    """Publish the adapters and play `FIRST`."""
    async with RegistryClient(stack.registry) as registry:
        await publish_variants(registry, DEMO / "adapters", NUM_ADAPTERS)
    async with InferenceClient(stack.grpc) as client:
        models = await targets(client, NUM_ADAPTERS, NAME_PREFIX)
        outcomes = await drive(client, FIRST, models, seed=0)
    assert all(outcome.finished for outcome in outcomes), outcomes


def measure(stack: Stack, runs: Sequence[Run], steps: Path, part: Path) -> list[Run]:
    """Every trace through the stack; the steps to fit go to `part`."""
    fetching = steps.read_bytes().splitlines(keepends=True)
    measured, parts = [], [line for line in fetching if b"step_s" not in line]  # arena and loads
    for number, run in enumerate(runs):
        outcomes, begin = part.with_name(f"outcomes-{number}.jsonl"), steps.stat().st_size
        send = ("bench", "trace", "--gateway", stack.grpc, "--outcomes", str(outcomes))
        loraplex(*send, *flags(run.workload))
        lines = outcomes.read_text().splitlines()
        measured.append(dataclasses.replace(run, outcomes=[outcome_of(line) for line in lines]))
        if run.name in (BURSTS, EVEN, CROWD):
            parts.append(steps.read_bytes()[begin:])
    part.write_bytes(b"".join(parts))
    return measured


def outcome_of(line: str) -> RequestOutcome:
    """A line of `--outcomes`."""
    fields = json.loads(line)
    return RequestOutcome(
        **{field.name: fields[field.name] for field in dataclasses.fields(RequestOutcome)}
    )


def simulate(costs: Costs, runs: Sequence[Run]) -> list[Run]:
    """Every trace after the other through one simulated worker."""
    settings = ["--costs", "fitted", "--on-disk"]
    fleet = fleet_of(make_parser().parse_args(settings), costs, ARENA_BYTES)
    configs = [folder / CONFIG_FILE for folder in source_folders(DEMO / "adapters")]
    mix = [json.loads(path.read_bytes())["r"] for path in configs]
    begins_s = [FIRST[-1].arrival_s + PAUSE_S]
    for run in runs:
        end_s = max(outcome.end_s for outcome in run.outcomes)
        begins_s.append(begins_s[-1] + end_s + PAUSE_S)
    traces = [
        [dataclasses.replace(r, arrival_s=r.arrival_s + begin_s) for r in generate(run.workload)]
        for run, begin_s in zip(runs, begins_s, strict=False)
    ]
    simulation = Simulation(fleet, ranks_of(mix, NUM_ADAPTERS))
    played = [*FIRST, *itertools.chain.from_iterable(traces)]
    outcomes = iter(simulation.run(played)[len(FIRST) :])
    return [
        dataclasses.replace(run, outcomes=[shifted(next(outcomes), -begin_s) for _ in trace])
        for run, trace, begin_s in zip(runs, traces, begins_s, strict=False)
    ]


def pooled(runs: Iterable[Run], name: str) -> Summary:
    """The summary of all runs of one name, as if each had begun at the end of the one before it."""
    joined: list[RequestOutcome] = []
    begin_s = 0.0
    for run in runs:
        if run.name == name:
            joined += [shifted(outcome, begin_s) for outcome in run.outcomes]
            begin_s = max(outcome.end_s for outcome in joined)
    return summarize(joined)


def shifted(outcome: RequestOutcome, by_s: float) -> RequestOutcome:
    """The same outcome, `by_s` seconds later."""
    assert outcome.first_token_s is not None, outcome.reason
    return dataclasses.replace(
        outcome,
        arrival_s=outcome.arrival_s + by_s,
        first_token_s=outcome.first_token_s + by_s,
        end_s=outcome.end_s + by_s,
    )


def with_outside(costs: Costs, runs: Iterable[Run]) -> Costs:
    """Times outside the engine, from the even traces: of requests that are the only one in flight
    when they arrive, and of the others."""
    kinds: dict[bool, list[RequestOutcome]] = {True: [], False: []}
    """Requests that are alone, and others."""
    for run in (run for run in runs if run.name == EVEN):
        end_s = 0.0
        for outcome in sorted(run.outcomes, key=lambda outcome: outcome.arrival_s):
            kinds[outcome.arrival_s >= end_s].append(outcome)
            end_s = max(end_s, outcome.end_s)
    alone, others = summarize(kinds[True]).outside, summarize(kinds[False]).outside
    return dataclasses.replace(
        costs,
        request_s=alone.p50_s,
        request_p90_s=alone.p90_s,
        awake_share=others.p50_s / alone.p50_s,
    )


def figure(summary: dict[str, Any], keys: tuple[str, ...]) -> float:
    """One number of a summary."""
    for key in keys:
        summary = summary[key]
    assert isinstance(summary, float), keys
    return summary


def compare(measured: Sequence[Run], costs: Costs) -> list[dict[str, Any]]:
    """Simulate the same traces; both sides and their ratios, by name."""
    simulated = simulate(costs, measured)
    compared = []
    for name in dict.fromkeys(run.name for run in measured):
        said, seen = (dataclasses.asdict(pooled(side, name)) for side in (simulated, measured))
        ratios = {label: figure(said, keys) / figure(seen, keys) for label, keys in FIGURES}
        compared.append({"run": name, "ratios": ratios, "simulated": said, "measured": seen})
    return compared


def main() -> None:
    """Measure, simulate, print, write `results/<machine>/simulated_and_measured.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="for state and step trace")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each trace (3)")
    parser.add_argument("--rounds", type=int, default=5, help="of all traces (5)")
    parser.add_argument("--fit-rate", type=float, default=20.0)
    parser.add_argument("--crowd-rate", type=float, default=100.0)
    parser.add_argument("--rates", default="10,20,40,80")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    steps, part = args.work_dir / "steps.jsonl", args.work_dir / "fitted.jsonl"
    steps.unlink(missing_ok=True)
    settings = {"LORAPLEX_DEBUG": f"step-trace={steps}", "LORAPLEX_KV_MEMORY": str(ARENA_BYTES)}
    with running_stack(DEMO / "base", "loraplex-demo", args.work_dir / "state", settings) as stack:
        asyncio.run(ask_for_all(stack))
        measured = measure(stack, planned(args), steps, part)
    fitted = fit_trace(part)
    costs = with_outside(fitted.costs, measured)
    print(f"fitted {fitted.num_steps} steps, R^2 {fitted.explained:.3f}; simulated over measured:")
    runs = compare(measured, costs)
    rows = [[run["run"], *(f"{ratio:.2f}" for ratio in run["ratios"].values())] for run in runs]
    print_table(["RATE", *(label.upper() for label, _ in FIGURES)], rows)
    write_results("simulated_and_measured", {"costs": costs, "runs": runs}, args)


if __name__ == "__main__":
    main()
