"""What the simulator says of an engine, beside what the engine did: no gateway between.

    OMP_NUM_THREADS=1 python -m benchmarks.simulated_engine --work-dir DIR [--rates 8,16,40]

A real engine (22M parameters, 400 real adapter files behind an arena that holds a part of them)
is given requests at the moments that a trace says and writes a step trace. On the run of the first
seed the simulator's costs are fitted; for each rate another seed's trace is predicted from those
costs alone, and run. Both sides count the same time: the processor time of the engine's process on
one thread, which other work on the machine disturbs little; idle gaps are skipped. Printed:
simulated over measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cpu_model import make_base
from benchmarks.machine import write_results
from benchmarks.many_adapters import (
    BATCH,
    RANKS,
    SMALL,
    Bench,
    make_adapter,
    make_bench,
    make_config,
)
from loraplex.cli.output import print_table
from loraplex.workload import (
    Outcome,
    Summary,
    TracedRequest,
    UniformLengths,
    Workload,
    generate,
    ranks_of,
    summarize,
)
from services.simulate.costs import Costs
from services.simulate.fitting import Fitted, fit_trace
from services.simulate.simulation import Fleet, Simulation
from services.worker.engine import Engine
from services.worker.messages import Command, Submit
from services.worker.step_trace import TracedRunner

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
        """Nothing is to do before `moment_s`."""
        self._skipped_s += max(0.0, moment_s - self())


def play(bench: Bench, trace: list[TracedRequest], clock: ProcessorClock) -> list[Outcome]:
    """Every request at its moment; what came of it."""
    first_s: dict[str, float] = {}
    end_s: dict[str, float] = {}
    left = [(request.arrival_s, submit_of(bench, request), request) for request in trace]
    sent: list[str] = []
    gc.collect()
    begin_s, place = clock(), 0
    while place < len(left) or bench.engine.has_requests:
        now = clock() - begin_s
        commands: list[Command] = []
        while place < len(left) and left[place][0] <= now:
            _, submit, request = left[place]
            if request.adapter is not None:
                commands.append(bench.fetched(request.adapter))
            commands.append(submit)
            sent.append(submit.request_id)
            place += 1
        output = bench.step(commands)
        now = clock() - begin_s
        for token in output.tokens:
            first_s.setdefault(token.request_id, now)
            if token.finish_reason:
                end_s[token.request_id] = now
        if not bench.engine.has_requests and place < len(left):
            clock.skip_to(begin_s + left[place][0])
    return [
        Outcome(request.arrival_s, first_s[name], end_s[name], request.num_output, finished=True)
        for name, (_, _, request) in zip(sent, left, strict=True)
    ]


def submit_of(bench: Bench, request: TracedRequest) -> Submit:
    """The request with a prompt as long as it says."""
    submit = bench.request(request.adapter, request.num_output)
    prompt = [bench.order.randrange(300, SMALL.vocab_size) for _ in range(request.num_input)]
    return msgspec.structs.replace(submit, prompt_ids=prompt)


def traced_bench(args: argparse.Namespace, steps: Path, clock: ProcessorClock) -> Bench:
    """An engine whose runner writes every step down."""
    base = make_base(SMALL, args.work_dir)
    folders = [
        make_adapter(SMALL, args.work_dir / f"adapter-{i:04d}", RANKS[i % 4], seed=i)
        for i in range(NUM_ADAPTERS)
    ]
    bench = make_bench(base, folders, args.arena_bytes)
    traced = TracedRunner(bench.runner, steps, clock)
    bench.engine = Engine(traced, make_config(base, args.arena_bytes), clock)
    return bench


def simulate(costs: Costs, args: argparse.Namespace, trace: list[TracedRequest]) -> Summary:
    """The same trace through the simulator."""
    config = make_config(Path(), args.arena_bytes)
    fleet = Fleet(costs, config, on_disk=True)
    return summarize(Simulation(fleet, ranks_of(RANKS, NUM_ADAPTERS)).run(trace))


def main() -> None:
    """Measure, fit, simulate, print, write `results/<machine>/simulated_engine.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the files; kept")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each trace (10)")
    parser.add_argument("--fit-rate", type=float, default=12.0)
    parser.add_argument("--rates", default="8,16,40")
    parser.add_argument("--arena-bytes", type=int, default=96 << 20)
    args = parser.parse_args()
    steps = args.work_dir / "steps.jsonl"
    steps.unlink(missing_ok=True)
    clock = ProcessorClock()
    bench = traced_bench(args, steps, clock)
    workload = Workload(NUM_ADAPTERS, args.fit_rate, args.seconds, alpha=0.5, lengths=LENGTHS)
    play(bench, generate(dataclasses.replace(workload, duration_s=2.0, seed=99)), clock)
    warm = steps.read_text()
    bursty = dataclasses.replace(workload, cv=FIT_CV, seed=0)
    play(bench, generate(bursty), clock)
    arena = warm[: warm.index("\n") + 1]
    steps.write_text(arena + steps.read_text()[len(warm) :])
    fitted: Fitted = fit_trace(steps)
    print(f"fitted {fitted.num_steps} steps, R^2 {fitted.explained:.3f}; simulated over measured:")
    rows, runs = [], []
    for seed, rate in enumerate(map(float, args.rates.split(",")), start=1):
        trace = generate(dataclasses.replace(workload, rate_per_s=rate, seed=seed))
        seen = summarize(play(bench, trace, clock))
        said = simulate(fitted.costs, args, trace)
        ratios = {name: of(said) / of(seen) for name, of in FIGURES.items()}
        rows.append([f"{rate:g}", *(f"{ratio:.2f}" for ratio in ratios.values())])
        pair: dict[str, Any] = {"simulated": said, "measured": seen}
        sides = {side: dataclasses.asdict(summary) for side, summary in pair.items()}
        runs.append({"rate": rate, "ratios": ratios, **sides})
    print_table(["RATE", *(name.upper() for name in FIGURES)], rows)
    results = {"batch": BATCH, "costs": dataclasses.asdict(fitted.costs), "runs": runs}
    print(f"wrote {write_results('simulated_engine', results)}")


if __name__ == "__main__":
    main()
