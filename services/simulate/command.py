"""`loraplex simulate`: one trace through a simulated fleet."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time

from loraplex.cli.workload_flags import print_summary, trace_of
from loraplex.errors import InvalidRequest
from loraplex.workload import ranks_of, summarize
from loraplex_services.simulate.costs import Costs, read_costs
from loraplex_services.simulate.fitting import Fitted, fit_trace
from loraplex_services.simulate.flags import DEFAULT_ARENA_BYTES, fleet_of, rank_mix
from loraplex_services.simulate.rooflines import ROOFLINES
from loraplex_services.simulate.simulation import Simulation


def run(args: argparse.Namespace) -> None:
    """Simulate what the flags describe and print it."""
    costs, arena_bytes = _costs(args)
    if args.outside is not None:
        median_s, p90_s = args.outside
        costs = dataclasses.replace(costs, request_s=median_s, request_p90_s=p90_s)
    trace = trace_of(args)
    ranks = ranks_of(rank_mix(args.ranks), trace.num_adapters)
    simulation = Simulation(fleet_of(args, costs, arena_bytes), ranks)
    gc.freeze()  # so that collections need not visit a million adapters
    begin_s = time.monotonic()
    outcomes = simulation.run(trace.requests)
    print(f"simulated in {time.monotonic() - begin_s:.1f} s", file=sys.stderr)
    tally = simulation.tally
    extra = {"steps": tally.steps, "loads": tally.loads, "preemptions": tally.preemptions}
    print_summary(summarize(outcomes, args.slo), extra, as_json=args.json)


def _costs(args: argparse.Namespace) -> tuple[Costs, int]:
    """The costs, and the size of the arena: theirs unless a flag sets it."""
    if args.costs is not None and args.save_costs is not None:
        raise InvalidRequest.field("--save-costs", args.save_costs, "is used only with --fit")
    if (known := ROOFLINES.get(str(args.costs))) is not None:
        return known.costs, known.arena_bytes
    if args.costs is not None:
        if not args.costs.exists():
            why = f"is neither a file nor one of {', '.join(ROOFLINES)}"
            raise InvalidRequest.field("--costs", str(args.costs), why)
        return read_costs(args.costs), DEFAULT_ARENA_BYTES
    fitted = fit_trace(args.fit)
    print(_quality(fitted), file=sys.stderr)
    if args.save_costs is not None:
        args.save_costs.write_text(fitted.costs.to_json())
    return fitted.costs, DEFAULT_ARENA_BYTES


def _quality(fitted: Fitted) -> str:
    share = fitted.modelled_s / fitted.measured_s if fitted.measured_s else 1.0
    return (
        f"fitted {fitted.num_steps} steps: R^2 {fitted.explained:.3f}, "
        f"modelled time {share:.3f} of measured"
    )
