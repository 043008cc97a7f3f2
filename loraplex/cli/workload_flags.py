"""The flags of a workload and the table of results that `bench trace` and `simulate` share."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loraplex.cli.output import print_fields, print_json, print_table
from loraplex.cli.parsing import count, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loraplex.workload import Summary, TracedRequest, Workload
    from loraplex.workload.trace import Lengths


TRACE_HELP = (
    "CSV log of real requests with the columns timestamp (seconds), model, input_length and "
    "output_length (tokens). --rate and --duration say how many are sampled. Its models become "
    "adapters, the most popular one first."
)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a trace, and the targets that a run is judged by."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=TRACE_HELP,
    )
    group.add_argument(
        "--adapters",
        type=count,
        metavar="N",
        help="number of adapters; 0 = only the base (default: 10)",
    )
    group.add_argument(
        "--rate", type=float, metavar="N", default=2.0, help="mean requests per second (default: 2)"
    )
    group.add_argument(
        "--cv",
        type=float,
        metavar="N",
        help="coefficient of variation of the gaps between requests; 1 = Poisson (default: 1)",
    )
    group.add_argument(
        "--alpha",
        type=float,
        metavar="N",
        help="exponent of the power law over adapters; 1 = uniform (default: 1)",
    )
    group.add_argument(
        "--arrivals",
        choices=("per-adapter", "pooled"),
        help="one Gamma process per adapter, as in the paper, or one for all, as in S-LoRA's "
        "released script (default: per-adapter)",
    )
    group.add_argument(
        "--duration",
        type=seconds,
        default=300.0,
        metavar="TIME",
        help="length of the trace (default: 5m)",
    )
    group.add_argument(
        "--lengths",
        metavar="IN,OUT",
        help="ranges of prompt and output tokens, or `arena` for lengths as in chats (default: "
        "8-512,8-512)",
    )
    group.add_argument(
        "--seed", type=count, metavar="N", default=0, help="seed of the trace (default: 0)"
    )
    group.add_argument(
        "--slo",
        type=seconds,
        default=6.0,
        metavar="TIME",
        help="target time of the first token (default: 6s)",
    )


class Trace(NamedTuple):
    """The trace that the flags describe."""

    requests: list[TracedRequest]
    num_adapters: int
    max_tokens: int
    """Largest number of tokens of one request, prompt and output together."""


def trace_of(args: argparse.Namespace) -> Trace:
    """The trace that the flags describe. Raises InvalidRequest."""
    from loraplex.errors import InvalidRequest
    from loraplex.workload import generate, read_log, sample_log

    if args.trace is None:
        workload = _workload_of(args)
        return Trace(generate(workload), workload.num_adapters, workload.lengths.max_tokens)
    for name in ("adapters", "cv", "alpha", "arrivals", "lengths"):
        if (value := getattr(args, name)) is not None:
            raise InvalidRequest.field(
                f"--{name}", value, "cannot be combined with --trace, whose file determines it"
            )
    requests, num_adapters = sample_log(read_log(args.trace), args.rate, args.duration, args.seed)
    most = max(request.num_input + request.num_output for request in requests)
    return Trace(requests, num_adapters, most)


def _workload_of(args: argparse.Namespace) -> Workload:
    from loraplex.workload import Arrivals, Workload

    return Workload(
        num_adapters=10 if args.adapters is None else args.adapters,
        rate_per_s=args.rate,
        duration_s=args.duration,
        cv=1.0 if args.cv is None else args.cv,
        alpha=1.0 if args.alpha is None else args.alpha,
        lengths=parse_lengths(args.lengths or "8-512,8-512"),
        seed=args.seed,
        arrivals=Arrivals(args.arrivals or "per-adapter"),
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
            "failures": ", ".join(f"{n} {reason}" for reason, n in summary.failures.items()),
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
