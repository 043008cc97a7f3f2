"""`loraplex fetch`: loads an adapter before its first request."""

from __future__ import annotations

import argparse
import dataclasses

from loraplex.cli.clients import gateway_client
from loraplex.cli.output import show
from loraplex.cli.parsing import Commands, count
from loraplex.refs import parse_ref


def add(commands: Commands) -> None:
    parser = commands.add(
        "fetch",
        _fetch,
        "Load adapters in advance on the workers that their requests will reach.",
        "loraplex fetch support:prod --workers 2",
    )
    parser.add_argument("refs", metavar="REF", nargs="+", help="adapter reference")
    parser.add_argument(
        "--workers",
        type=count,
        default=1,
        metavar="N",
        help="number of workers that load each adapter (default: 1)",
    )


async def _fetch(args: argparse.Namespace) -> None:
    async with gateway_client(args) as client:
        for ref in args.refs:
            fetched = await client.fetch(ref, args.workers)
            named = parse_ref(fetched.ref)
            name = fetched.ref.removeprefix(f"{named.tenant}/").partition(":")[0]
            known = {"tenant": named.tenant, "name": name, "version": named.version}
            workers = ", ".join(fetched.worker_ids)
            text = f"{fetched.ref} {fetched.digest[:19]} on {workers} ({fetched.took_s:.2f} s)"
            show(known | dataclasses.asdict(fetched), text, as_json=args.json)
