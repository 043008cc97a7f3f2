"""`loraplex usage`: the usage of each tenant and adapter."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from loraplex.cli.clients import registry_client
from loraplex.cli.output import show_table
from loraplex.cli.parsing import Commands, add_unused_server

if TYPE_CHECKING:
    from loraplex.api.registry import UsageEntry

_COUNTERS = ("requests", "errors", "prompt_tokens", "cached_tokens", "generated_tokens")


def add(commands: Commands) -> None:
    parser = commands.add(
        "usage",
        _usage,
        "Show requests, tokens, errors and seconds by day, tenant and adapter.",
        "loraplex usage --adapter acme/support --since 2026-11-01 --csv",
        server="registry",
    )
    parser.add_argument(
        "--tenant",
        default="",
        help="tenant to show, or 'all'; needs the first admin key unless it is your own (default: "
        "your own)",
    )
    parser.add_argument(
        "--adapter", default="", metavar="[TENANT/]NAME", help="show only this adapter"
    )
    parser.add_argument(
        "--since", default="", metavar="DAY", help="first day, as YYYY-MM-DD (default: 30 days ago)"
    )
    parser.add_argument("--csv", action="store_true", help="print comma-separated values")
    add_unused_server(parser, "gateway")


async def _usage(args: argparse.Namespace) -> None:
    every = args.tenant == "all"
    async with registry_client(args) as client:
        entries = await client.usage(
            tenant="" if every else args.tenant,
            all_tenants=every,
            model=args.adapter,
            since=args.since,
        )
    header = ("day", "tenant", "model", *_COUNTERS, "seconds")
    if args.csv and not args.json:
        import csv

        csv.writer(sys.stdout).writerows([header, *map(_row, entries)])
        return
    shown = [name.upper().replace("_", " ") for name in header]
    show_table(shown, entries, _row, as_json=args.json)


def _row(entry: UsageEntry) -> tuple[str, ...]:
    counters = (str(getattr(entry, name)) for name in _COUNTERS)
    return (entry.day, entry.tenant, entry.model, *counters, f"{entry.duration_s:.3f}")
