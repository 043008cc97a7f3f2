"""`loraplex bench`: measure a running stack."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from loraplex.cli.clients import gateway_client, registry_client
from loraplex.cli.parsing import Commands, seconds
from loraplex.cli.workload_flags import add_workload, print_summary, trace_of
from loraplex.errors import InvalidRequest
from loraplex.units import counted

if TYPE_CHECKING:
    from loraplex.client.registry_client import RegistryClient
    from loraplex.workload import RequestOutcome, TracedRequest

EXAMPLE = "loraplex bench trace --adapters 100 --rate 4 --duration 2m --prepare-from ./my-adapter"


def add(commands: Commands) -> None:
    group = commands.group("bench", "Send a workload to a running stack, and measure it.", EXAMPLE)
    parser = group.add(
        "trace",
        _trace,
        "Send a workload of the S-LoRA paper through the gateway in real time, and print the "
        "figures.",
        EXAMPLE,
    )
    add_workload(parser)
    parser.add_argument(
        "--first-token",
        type=seconds,
        metavar="TIME",
        help="deadline of the first token; requests that would miss it are abandoned",
    )
    parser.add_argument(
        "--outcomes",
        type=Path,
        metavar="FILE",
        help="write the outcome of each request: one JSON object per line, with times in seconds "
        "since the start",
    )
    parser.add_argument(
        "--prepare-from",
        type=Path,
        metavar="DIR",
        help="first publish --adapters distinct copies of the adapter, or adapters, in DIR",
    )
    parser.add_argument(
        "--keep", action="store_true", help="do not delete what --prepare-from published"
    )
    parser.add_argument(
        "--registry",
        metavar="HOST:PORT",
        help="registry for --prepare-from (default: LORAPLEX_REGISTRY_ADDRESS)",
    )


async def _trace(args: argparse.Namespace) -> None:
    from loraplex.workload import summarize
    from loraplex.workload.driving import check_lengths, drive, targets

    trace = trace_of(args)
    file = _opened(args.outcomes)
    async with gateway_client(args) as client:
        await check_lengths(client, trace.max_tokens)
        async with _prepared(args, trace.num_adapters) as prefix:
            models = await targets(client, trace.num_adapters, prefix)
            outcomes = await drive(client, trace.requests, models, args.seed, args.first_token)
    if file is not None:
        with file:
            _write(file, trace.requests, outcomes)
    print_summary(summarize(outcomes, args.slo), {}, as_json=args.json)


def _opened(path: Path | None) -> TextIO | None:
    """Check the path before the first request, so that no run is lost. Raises InvalidRequest."""
    try:
        return None if path is None else path.open("w")
    except OSError as error:
        raise InvalidRequest.field("--outcomes", path, f"cannot be written: {error}") from None


def _write(
    file: TextIO, requests: Sequence[TracedRequest], outcomes: Sequence[RequestOutcome]
) -> None:
    """Write one line for each outcome, in the order of the trace."""
    for request, outcome in zip(requests, outcomes, strict=True):
        asked = {"adapter": request.adapter, "num_input": request.num_input}
        file.write(json.dumps({**asked, **dataclasses.asdict(outcome)}) + "\n")


@asynccontextmanager
async def _prepared(args: argparse.Namespace, num_adapters: int) -> AsyncIterator[str]:
    """Publish adapters if asked to, and delete them afterwards, except those that were there
    before. Yields the prefix of the names to use."""
    if args.prepare_from is None:
        yield ""
        return
    from loraplex.workload.adapter_variants import NAME_PREFIX, publish_variants

    async with registry_client(args) as registry:
        before = {version.name async for version in registry.list(name_prefix=NAME_PREFIX)}
        try:
            names = await publish_variants(registry, args.prepare_from, num_adapters)
            _tell(args, "published", len(names))
            yield NAME_PREFIX
        finally:
            if not args.keep:
                _tell(args, "deleted", await _clean_up(registry, before, num_adapters))


def _tell(args: argparse.Namespace, verb: str, num_adapters: int) -> None:
    """Report the outcome to people. With `--json`, stderr has only the object of a failure."""
    if num_adapters and not args.json:
        print(f"{verb} {counted(num_adapters, 'adapter')}", file=sys.stderr)


async def _clean_up(registry: RegistryClient, before: Set[str], count: int) -> int:
    """Delete the adapters that a run published; returns how many."""
    from loraplex.errors import NotFound
    from loraplex.workload.adapter_variants import variant_name

    made = [name for name in map(variant_name, range(count)) if name not in before]
    num_deleted = 0
    for name in made:
        with suppress(NotFound):  # Publishing was interrupted before this adapter.
            await registry.delete(name, every=True, purge=True)
            num_deleted += 1
    return num_deleted
