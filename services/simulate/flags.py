"""The command line of `loraplex simulate`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.cli.parsing import Parser, add_json, add_unused_server, count, num_bytes, seconds
from loraplex.cli.workload_flags import add_workload
from loraplex.errors import InvalidRequest
from loraplex.workload import RANK_MIXES

if TYPE_CHECKING:  # `--help` must not wait for the worker's engine
    from loraplex_services.simulate.costs import Costs
    from loraplex_services.simulate.simulation import SimulatedFleet

ROOFLINE_NAMES = ("llama-7b@a10g", "llama-7b@a100-80g", "llama-13b@a100-80g")
DEFAULT_ARENA_BYTES = 64 << 20
_MAX_RANK = 4096
"""The largest rank that a worker can be told to accept."""
EPILOG = """examples:
  loraplex simulate --costs llama-7b@a100-80g --adapters 2000 --ranks S2 --rate 8 --on-disk
  loraplex simulate --costs llama-7b@a10g --adapters 1000000 --workers 1000 --rate 1000 --duration 9
  # with costs that are fitted to a real run:
  LORAPLEX_DEBUG=step-trace=/tmp/steps.jsonl loraplex up --model ./llama-3-8b
  loraplex simulate --fit /tmp/steps.jsonl --save-costs costs.json --adapters 100
  loraplex simulate --costs costs.json --adapters 2000 --ranks S2 --rate 4 --cluster-size 8"""


def make_parser() -> Parser:
    """All flags."""
    parser = Parser(
        prog="loraplex simulate",
        description="Run the scheduling code of the gateway and the worker under a virtual clock.",
        epilog=EPILOG,
    )
    costs = parser.add_mutually_exclusive_group(required=True)
    costs.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="cost model that --save-costs wrote, or the roofline of a base on a GPU: "
        + ", ".join(ROOFLINE_NAMES),
    )
    costs.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        help="step trace of a real worker, to fit a cost model from",
    )
    parser.add_argument(
        "--save-costs", type=Path, metavar="FILE", help="write the cost model to FILE"
    )
    add_workload(parser)
    _add_fleet(parser)
    add_unused_server(parser, "gateway")
    add_json(parser)
    return parser


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet")
    group.add_argument(
        "--workers", type=count, default=1, metavar="N", help="number of workers (default: 1)"
    )
    group.add_argument(
        "--ranks",
        default="S2",
        metavar="MIX",
        help="ranks of the adapters: S1 to S6 of the S-LoRA paper, or a list such as 8,64 "
        "(default: S2)",
    )
    group.add_argument(
        "--kv-memory",
        type=num_bytes,
        metavar="BYTES",
        help="memory of KV cache and adapters (default: 64MiB, or what the GPU of a roofline has "
        "left)",
    )
    group.add_argument(
        "--newest-first",
        action="store_true",
        help="serve the newest request first, a baseline that exists only here",
    )
    group.add_argument(
        "--cluster-size",
        type=count,
        default=0,
        metavar="N",
        help="once N adapters run, serve requests for these first; 0 = never (default: 0)",
    )
    _add_limits(group)
    _add_requests(group)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-seqs",
        type=count,
        default=256,
        metavar="N",
        help="largest number of requests in one step (default: 256)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=count,
        default=2048,
        metavar="N",
        help="largest number of tokens in one step (default: 2048)",
    )
    group.add_argument(
        "--max-step",
        type=seconds,
        default=0.2,
        metavar="TIME",
        help="target time of a step in which requests decode; 0 = no target (default: 200ms)",
    )
    group.add_argument(
        "--max-loras",
        type=count,
        default=0,
        metavar="N",
        help="largest number of adapters in one step; 0 = no limit (default: 0)",
    )
    group.add_argument(
        "--max-resident",
        type=count,
        default=4096,
        metavar="N",
        help="adapter slots (default: 4096)",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--outside",
        type=median_and_p90,
        metavar="TIME[,TIME]",
        help="time that a request spends outside the engine: median and 90th percentile, as "
        "`bench trace` prints them",
    )
    group.add_argument("--deadline", type=seconds, metavar="TIME", help="deadline of each request")
    group.add_argument(
        "--first-token",
        type=seconds,
        metavar="TIME",
        help="deadline of the first token; requests that would miss it are abandoned",
    )
    group.add_argument(
        "--direct",
        action="store_true",
        help="simulate no gateway: requests queue at the workers, and none is refused",
    )
    group.add_argument(
        "--on-disk", action="store_true", help="start with all adapters on every worker's disk"
    )


def fleet_of(args: argparse.Namespace, costs: Costs, arena_bytes: int) -> SimulatedFleet:
    """The fleet that the flags describe, with `arena_bytes` unless they say otherwise.

    Raises: InvalidRequest.
    """
    from loraplex_services.gateway.admission.queue import AdmissionLimits
    from loraplex_services.simulate.simulation import SimulatedFleet
    from loraplex_services.worker.types.messages import EngineConfig

    for name in ("workers", "max_num_seqs", "max_num_batched_tokens", "max_resident"):
        if getattr(args, name) < 1:
            raise InvalidRequest.field(f"--{name.replace('_', '-')}", 0, "must be 1 or more")
    arena_bytes = arena_bytes if args.kv_memory is None else args.kv_memory
    if arena_bytes < costs.block_bytes:
        raise InvalidRequest.field(
            "--kv-memory", arena_bytes, f"must hold at least one block of {costs.block_bytes}"
        )
    engine = EngineConfig(
        model_dir="",
        device="simulated",
        dtype="float32",
        arena_bytes=arena_bytes,
        max_lora_rank=max(rank_mix(args.ranks)),
        max_resident=args.max_resident,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_step_s=args.max_step,
        max_num_seqs=min(args.max_num_seqs, args.max_num_batched_tokens),
        max_loras=args.max_loras or None,
        cluster_size=args.cluster_size,
    )
    fleet = SimulatedFleet(
        costs,
        engine,
        args.workers,
        args.on_disk,
        args.deadline,
        args.first_token,
        newest_first=args.newest_first,
    )
    if args.direct:
        return fleet
    # One admission controller stands for all gateways of such a fleet.
    batch_capacity = max(AdmissionLimits().max_running, args.workers * engine.max_num_seqs)
    return dataclasses.replace(fleet, admission=AdmissionLimits(batch_capacity, batch_capacity))


def median_and_p90(text: str) -> tuple[float, float]:
    """`6ms,11ms`; a single time applies to all requests. Raises argparse.ArgumentTypeError."""
    median, _, p90 = text.partition(",")
    times = seconds(median), seconds(p90 or median)
    if times[1] < times[0]:
        raise argparse.ArgumentTypeError(f"expected a median and a longer time, got {text!r}")
    return times


def rank_mix(text: str) -> Sequence[int]:
    """A setting's name or ranks with commas. Raises InvalidRequest."""
    if text in RANK_MIXES:
        return RANK_MIXES[text]
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        ranks = [0]
    if not all(1 <= rank <= _MAX_RANK for rank in ranks):
        why = f"must be one of {', '.join(RANK_MIXES)}, or ranks up to {_MAX_RANK} like 8,64"
        raise InvalidRequest.field("--ranks", text, why)
    return ranks
