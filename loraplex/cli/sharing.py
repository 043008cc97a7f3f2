"""`registry share` and `describe`: settings of an adapter that apply to all its versions."""

from __future__ import annotations

import argparse

from loraplex.cli.catalog import spelled_labels
from loraplex.cli.clients import registry_client
from loraplex.cli.output import print_fields, print_json, show
from loraplex.cli.parsing import Commands, add_label


def add(commands: Commands) -> None:
    parser = commands.add(
        "share",
        _share,
        "Set who besides the owner may run an adapter.",
        "registry share support --with acme --with globex --pullable",
    )
    parser.add_argument("name", metavar="NAME")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--private", action="store_true", help="share it with no other tenant")
    who.add_argument("--public", action="store_true", help="share it with every tenant")
    who.add_argument(
        "--with",
        dest="tenants",
        action="append",
        metavar="TENANT",
        help="share it with this tenant; may be repeated",
    )
    parser.add_argument(
        "--pullable",
        action=argparse.BooleanOptionalAction,
        help="let the tenants download it as well, or not",
    )

    parser = commands.add(
        "describe",
        _describe,
        "Show or change the description and the labels of an adapter.",
        "registry describe support 'Answers tickets' --label team=support",
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="new description; '' removes it")
    add_label(parser, "-l", about="add or replace a label")
    parser.add_argument(
        "--remove-label",
        action="append",
        default=[],
        metavar="K",
        help="remove a label; may be repeated",
    )


async def _describe(args: argparse.Namespace) -> None:
    from loraplex.refs import parse_name

    parse_name(args.name)
    async with registry_client(args) as client:
        if args.text is None and not args.label and not args.remove_label:
            version = (await client.get(args.name)).version
            text, labels = version.description, version.adapter_labels
        else:
            said = await client.describe(
                args.name,
                args.text,
                set_labels=dict(args.label),
                remove_labels=args.remove_label,
            )
            text, labels = said.description, said.labels
    if args.json:
        print_json({"name": args.name, "description": text, "labels": dict(labels)})
        return
    print_fields(
        {
            "adapter": args.name,
            "description": text,
            "labels": spelled_labels(labels),
        }
    )


async def _share(args: argparse.Namespace) -> None:
    visibility = "private" if args.private else "public" if args.public else ""
    if args.tenants:
        visibility = "shared"
    async with registry_client(args) as client:
        sharing = await client.set_sharing(
            args.name, visibility, shared_with=args.tenants or (), pullable=args.pullable
        )
    with_whom = f" with {', '.join(sharing.shared_with)}" if sharing.shared_with else ""
    pullable = " and may be downloaded" if sharing.pullable else ""
    show(sharing, f"{args.name} is {sharing.visibility}{with_whom}{pullable}", as_json=args.json)
