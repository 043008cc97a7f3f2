"""Simulated results of an engine alone, compared with measured ones.

    OMP_NUM_THREADS=1 python -m benchmarks run simulation.engine --work-dir DIR [--rates 8,16,40]

A real engine (22M parameters, 400 real adapter files, an arena that holds some of them) gets
requests at the times of a trace and writes a step trace. Bursty traces, on which the simulator's
costs are fitted, alternate with traces of other seeds, one per rate, which are predicted from those
costs alone and run twice. All count the processor time of the engine's process on one thread, which
other work on the machine disturbs little; idle gaps are skipped. The simulator plays all traces one
after the other as well, because adapters and shares of accepted drafts outlast a trace. Printed for
each figure: simulated over measured, and measured again over measured, each as the median over the
seeds with the lowest and the highest. Near its capacity, a queue amplifies small differences in
speed; the second ratio says how much.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu_model import make_base
from benchmarks.machine import options_of, write_results
from benchmarks.serving.many_adapters import (
    BATCH,
    RANKS,
    SMALL,
    Bench,
    make_adapter,
    make_bench,
    make_config,
)
from benchmarks.simulation.stack import PAUSE_S, shifted
from loraplex.cli.output import print_table
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
from loraplex_services.simulate.costs import Costs
from loraplex_services.simulate.fitting import fit_trace
from loraplex_services.simulate.simulation import SimulatedFleet, Simulation
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.engine.step_trace import TracedRunner
from loraplex_services.worker.types.messages import Command

Played = tuple[Workload, list[RequestOutcome]]
"""A trace and the outcomes of its requests."""
NUM_ADAPTERS = 400
FIT_CV = 4.0
"""Bursts, so that the run on which costs are fitted has steps of every size."""
LENGTHS = UniformLengths((8, 128), (8, 64))
FIGURES: dict[str, Callable[[Summary], float]] = {
    "requests/s": lambda s: s.requests_per_s,
    "first token mean": lambda s: s.first_token.mean_s,
    "first token p50": lambda s: s.first_token.p50_s,
    "per token mean": lambda s: s.per_token.mean_s,
    "per token p50": lambda s: s.per_token.p50_s,
    "whole mean": lambda s: s.latency.mean_s,
    "whole p50": lambda s: s.latency.p50_s,
    "whole p90": lambda s: s.latency.p90_s,
}


class ProcessorClock:
    """Processor time of this process, and gaps that were skipped. Seconds."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return self._skipped_s + time.process_time()

    def skip_to(self, moment_s: float) -> None:
        """Skip the time until `moment_s`, before which there is nothing to do."""
        self._skipped_s += max(0.0, moment_s - self())


def play(bench: Bench, trace: list[TracedRequest], clock: ProcessorClock) -> list[RequestOutcome]:
    """Send every request when it is due, and return the outcomes."""
    first_s: dict[str, float] = {}
    end_s: dict[str, float] = {}
    left = [(r.arrival_s, bench.request(r.adapter, r.num_output, r.num_input), r) for r in trace]
    sent: list[str] = []
    gc.collect()
    begin_s, index = clock(), 0
    while index < len(left) or bench.engine.has_requests:
        now = clock() - begin_s
        commands: list[Command] = []
        while index < len(left) and left[index][0] <= now:
            _, submit, request = left[index]
            if request.adapter is not None:
                commands.append(bench.fetched(request.adapter))
            commands.append(submit)
            sent.append(submit.request.request_id)
            index += 1
        output = bench.step(commands)
        now = clock() - begin_s
        for token in output.tokens:
            first_s.setdefault(token.request_id, now)
            if token.finish_reason:
                end_s[token.request_id] = now
        if not bench.engine.has_requests and index < len(left):
            clock.skip_to(begin_s + left[index][0])
    return [
        RequestOutcome(
            request.arrival_s, first_s[name], end_s[name], request.num_output, finished=True
        )
        for name, (_, _, request) in zip(sent, left, strict=True)
    ]


def traced_bench(args: Namespace, steps: Path, clock: ProcessorClock) -> Bench:
    """An engine whose runner writes every step down."""
    base = make_base(SMALL, args.work_dir)
    folders = [
        make_adapter(SMALL, args.work_dir / f"adapter-{i:04d}", RANKS[i % 4], seed=i)
        for i in range(NUM_ADAPTERS)
    ]
    bench = make_bench(base, folders, args.arena_bytes)
    traced = TracedRunner(bench.runner, steps, clock)
    bench.engine = Engine(traced, make_config(base, args.arena_bytes, drafts=True), clock)
    return bench


def simulate(costs: Costs, args: Namespace, played: Sequence[Played]) -> list[Summary]:
    """Simulate the same traces."""
    trace: list[TracedRequest] = []
    begins_s = [0.0]
    for workload, outcomes in played:
        requests, begin_s = generate(workload), begins_s[-1]
        trace += [dataclasses.replace(r, arrival_s=r.arrival_s + begin_s) for r in requests]
        begins_s.append(begin_s + max(outcome.end_s for outcome in outcomes) + PAUSE_S)
    config = make_config(Path(), args.arena_bytes, drafts=True)
    fleet = SimulatedFleet(costs, config, on_disk=True)
    simulated = iter(Simulation(fleet, ranks_of(RANKS, NUM_ADAPTERS)).run(trace))
    return [
        summarize([shifted(next(simulated), -begin_s) for _ in outcomes])
        for begin_s, (_, outcomes) in zip(begins_s, played, strict=False)
    ]


def compared(costs: Costs, args: Namespace, played: Sequence[Played]) -> list[Any]:
    """All runs of each trace that was played twice, and their ratios."""
    found: dict[Workload, list[tuple[Summary, Summary]]] = {}
    for (workload, outcomes), said in zip(played, simulate(costs, args, played), strict=True):
        found.setdefault(workload, []).append((said, summarize(outcomes)))
    return [
        ratios(workload, *pairs[0], pairs[1][1])
        for workload, pairs in found.items()
        if len(pairs) > 1
    ]


def ratios(workload: Workload, said: Summary, first: Summary, again: Summary) -> dict[str, Any]:
    """All runs of one trace, and their ratios."""
    sides = {"simulated": said, "measured": first, "again": again}
    return {
        "rate": workload.rate_per_s,
        "seed": workload.seed,
        "simulated over measured": {name: of(said) / of(first) for name, of in FIGURES.items()},
        "again over measured": {name: of(again) / of(first) for name, of in FIGURES.items()},
        **sides,
    }


def rows_of(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Two for each rate."""
    rows = []
    for rate in dict.fromkeys(run["rate"] for run in runs):
        for kind in ("simulated over measured", "again over measured"):
            row = [f"{rate:g}", kind.partition(" ")[0]]
            for name in FIGURES:
                ratios = [run[kind][name] for run in runs if run["rate"] == rate]
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                row.append(f"{statistics.median(ratios):.2f} ({spread})")
            rows.append(row)
    return rows


def main() -> None:
    """Measure, fit, simulate, print, write `results/<machine>/simulated_engine.json`."""
    parser = options_of(__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each trace (3)")
    parser.add_argument("--fit-rate", type=float, default=16.0)
    parser.add_argument("--rates", default="8,16,40")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--arena-bytes", type=int, default=96 << 20)
    args = parser.parse_args()
    steps = args.work_dir / "steps.jsonl"
    steps.unlink(missing_ok=True)
    clock = ProcessorClock()
    bench = traced_bench(args, steps, clock)
    usual = Workload(NUM_ADAPTERS, args.fit_rate, args.seconds, alpha=0.5, lengths=LENGTHS)
    played: list[Played] = []

    def play_next(workload: Workload) -> None:
        played.append((workload, play(bench, generate(workload), clock)))

    play_next(dataclasses.replace(usual, duration_s=2.0, seed=99))
    rates = [float(rate) for rate in args.rates.split(",")]
    parts = [steps.read_text().partition("\n")[0] + "\n"]  # of the arena
    for seed in range(args.seeds):
        for turn in range(2):
            begin = steps.stat().st_size
            play_next(dataclasses.replace(usual, cv=FIT_CV, seed=100 + 2 * seed + turn))
            parts.append(steps.read_text()[begin:])
            for rate in rates:
                play_next(dataclasses.replace(usual, rate_per_s=rate, seed=seed))
    steps.write_text("".join(parts))
    fitted = fit_trace(steps)
    print(f"fitted {fitted.num_steps} steps, R^2 {fitted.explained:.3f}; simulated over measured:")
    runs = compared(fitted.costs, args, played)
    print_table(["RATE", "RATIO", *(name.upper() for name in FIGURES)], rows_of(runs))
    results = {"batch": BATCH, "costs": fitted.costs, "runs": runs}
    write_results("simulated_engine", results, args)


if __name__ == "__main__":
    main()
