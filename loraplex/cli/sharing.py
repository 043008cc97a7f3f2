"""`registry share`."""

from __future__ import annotations

import argparse
from typing import Any

from loraplex.cli.output import print_json
from loraplex.cli.parsing import add_command, add_connection
from loraplex.cli.publish import client_of


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "share",
        _share,
        "Say who besides its owner may run an adapter.",
        "registry share support --with acme --with globex --pullable",
    )
    parser.add_argument("name", metavar="NAME")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--private", action="store_true", help="nobody else")
    who.add_argument("--public", action="store_true", help="every tenant")
    who.add_argument(
        "--with", dest="tenants", action="append", metavar="TENANT", help="these; repeatable"
    )
    parser.add_argument(
        "--pullable",
        action=argparse.BooleanOptionalAction,
        help="whether they may download it too",
    )
    add_connection(parser, "registry")


async def _share(args: argparse.Namespace) -> None:
    visibility = "private" if args.private else "public" if args.public else ""
    if args.tenants:
        visibility = "shared"
    async with client_of(args) as client:
        sharing = await client.set_sharing(
            args.name, visibility, shared_with=args.tenants or (), pullable=args.pullable
        )
    if args.json:
        print_json(sharing)
        return
    with_whom = f" with {', '.join(sharing.shared_with)}" if sharing.shared_with else ""
    pullable = ", may be downloaded" if sharing.pullable else ""
    print(f"{args.name} is {sharing.visibility}{with_whom}{pullable}")
