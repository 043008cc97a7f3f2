"""`loraplex top`: the status, again and again."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from loraplex.cli.generate import client_of, print_status
from loraplex.cli.parsing import add_command, add_connection, count, seconds

CLEAR_SCREEN = "\x1b[H\x1b[2J\x1b[3J"


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "top",
        _top,
        "Watch workers, what is resident on them, and their load, until interrupted.",
        "loraplex top --interval 5s",
    )
    parser.add_argument(
        "--interval", type=seconds, default=2.0, metavar="TIME", help="between two looks (2s)"
    )
    parser.add_argument(
        "--count", type=count, metavar="N", default=0, help="end after N screens (0 = never)"
    )
    add_connection(parser, "gateway")


async def _top(args: argparse.Namespace) -> None:
    import asyncio

    num_shown = 0
    async with client_of(args) as client:
        while True:
            status = await client.status(include_adapters=True)
            if not args.json and sys.stdout.isatty():
                print(CLEAR_SCREEN, end="")
            print_status(status, as_json=args.json)
            sys.stdout.flush()
            num_shown += 1
            if num_shown == args.count:
                return
            await asyncio.sleep(args.interval)
