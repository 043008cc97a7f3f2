"""What `bench trace` and `simulate` share: the flags of a workload and the table of a run."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from loraplex.cli.output import print_fields, print_json, print_table
from loraplex.cli.parsing import count, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loraplex.workload import Summary, Workload
    from loraplex.workload.trace import Lengths


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The parameters of a trace, and of judging a run."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--adapters", type=count, metavar="N", default=10, help="adapters; 0 = the base (10)"
    )
    group.add_argument(
        "--rate", type=float, metavar="N", default=2.0, help="mean requests a second (2)"
    )
    group.add_argument(
        "--cv", type=float, metavar="N", default=1.0, help="burstiness; 1 = Poisson (1)"
    )
    group.add_argument(
        "--alpha",
        type=float,
        default=1.0,
        metavar="N",
        help="power law over adapters; 1 = uniform (1)",
    )
    group.add_argument("--duration", type=seconds, default=60.0, metavar="TIME", help="(60)")
    group.add_argument(
        "--lengths",
        default="8-512,8-512",
        metavar="IN,OUT",
        help="token ranges of prompt and output, or `arena` for chat-like ones (8-512,8-512)",
    )
    group.add_argument("--seed", type=count, metavar="N", default=0, help="(0)")
    group.add_argument("--slo", type=seconds, default=6.0, metavar="TIME", help="first token (6)")


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that the flags describe. Raises InvalidRequest."""
    from loraplex.workload import Workload

    return Workload(
        num_adapters=args.adapters,
        rate_per_s=args.rate,
        duration_s=args.duration,
        cv=args.cv,
        alpha=args.alpha,
        lengths=parse_lengths(args.lengths),
        seed=args.seed,
    )


def parse_lengths(text: str) -> Lengths:
    """`8-512,8-512`, `64,16` or `arena`. Raises InvalidRequest."""
    from loraplex.errors import InvalidRequest
    from loraplex.workload import LogNormalLengths, UniformLengths

    if text == "arena":
        return LogNormalLengths()
    try:
        inputs, outputs = (_range(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest.field(
            "--lengths", text, "must be two ranges such as 8-512,8-512, or `arena`"
        ) from None
    return UniformLengths(inputs, outputs)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def print_summary(summary: Summary, extra: Mapping[str, object], *, as_json: bool) -> None:
    """The run as a table, or as one object with `extra` in it."""
    if as_json:
        print_json({**dataclasses.asdict(summary), **extra})
        return
    print_fields(
        {
            "finished": f"{summary.num_finished} of {summary.num_requests} requests "
            f"in {summary.makespan_s:.1f} s",
            "throughput": f"{summary.requests_per_s:.2f} requests/s, "
            f"{summary.output_tokens_per_s:.1f} output tokens/s",
            "attainment": f"{summary.attainment:.3f} (first token in {summary.slo_s:g} s)",
            "satisfaction": f"{summary.satisfaction:.3f}",
            **{name: str(value) for name, value in extra.items()},
        }
    )
    print()
    figures = (
        ("first token", summary.first_token),
        ("  outside engine", summary.outside),
        ("per token", summary.per_token),
        ("whole request", summary.latency),
    )
    rows = [
        (name, *(f"{1000 * value:.1f}" for value in dataclasses.astuple(figure)))
        for name, figure in figures
        if figure.p99_s or figure is not summary.outside
    ]
    print_table(("LATENCY (ms)", "MEAN", "P50", "P90", "P99"), rows)
