"""`registry tag`, `split`, `rollback`, `history` and `delete`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loraplex.cli import shadow
from loraplex.cli.catalog import pending_of, spelled, targets_of
from loraplex.cli.clients import registry_client
from loraplex.cli.output import moment, show, show_table
from loraplex.cli.parsing import Commands, add_label, add_when_loaded
from loraplex.cli.staged import until_moved

if TYPE_CHECKING:
    from loraplex.api.registry import Tag, TagMove, TagTarget
    from loraplex.client.registry_client import RegistryClient

MAX_WEIGHT = 1_000_000


def add(commands: Commands) -> None:
    parser = commands.add(
        "tag",
        _tag,
        "Point a tag at a version, or delete it.",
        "registry tag acme/support:v3 prod --expect none",
    )
    parser.add_argument(
        "ref", metavar="REF", help="version to point at; with --delete, the name of the adapter"
    )
    parser.add_argument("tag", metavar="TAG", help="a tag, such as prod")
    _add_expect(parser)
    parser.add_argument("--delete", action="store_true", help="remove the tag")
    add_when_loaded(parser)

    parser = commands.add(
        "split",
        _split,
        "Split the requests for a tag between versions; each caller keeps its version.",
        "registry split acme/support prod v3=90 v4=10",
    )
    _add_name_and_tag(parser)
    parser.add_argument(
        "targets",
        nargs="+",
        type=_target,
        metavar="vN=WEIGHT",
        help="a version and its share of the requests, such as v3=90",
    )
    _add_expect(parser)
    shadow.add_flags(parser)
    add_when_loaded(parser)

    _add_rollback_and_history(commands)
    _add_delete(commands)


def _add_rollback_and_history(commands: Commands) -> None:
    parser = commands.add(
        "rollback",
        _rollback,
        "Move a tag back to its previous target.",
        "registry rollback acme/support prod",
    )
    _add_name_and_tag(parser)
    parser.add_argument(
        "--to",
        type=_version,
        default=0,
        metavar="vN",
        help="version to go back to (default: the previous one)",
    )

    parser = commands.add(
        "history",
        _history,
        "Show the last moves of a tag, newest first.",
        "registry history acme/support prod",
    )
    _add_name_and_tag(parser)


def _add_name_and_tag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="[TENANT/]NAME")
    parser.add_argument("tag", metavar="TAG", help="a tag, such as prod")


def _add_expect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expect",
        metavar="DIGEST|none",
        help="move the tag only if it points at DIGEST now (none: only if it does not exist)",
    )


def _add_delete(commands: Commands) -> None:
    parser = commands.add(
        "delete",
        _delete,
        "Delete a version, everything under a name, or all adapters that match.",
        "registry delete 'trace-*' --all --dry-run",
    )
    parser.add_argument(
        "ref",
        metavar="REF",
        help="NAME:vN; with --all: NAME, or a pattern such as 'trace-*'",
    )
    about = "with --all: only adapters whose latest version has this label"
    add_label(parser, "-l", about=about)
    parser.add_argument("--dry-run", action="store_true", help="with --all: only print the names")
    parser.add_argument("--all", action="store_true", help="delete all versions and tags")
    parser.add_argument(
        "--force", action="store_true", help="also delete the tags that point at the version"
    )
    parser.add_argument(
        "--purge",
        action="store_true",
        help="let the next `registry gc` delete the files (default: after 7 days)",
    )


def _version(text: str) -> int:
    from loraplex.errors import InvalidRequest
    from loraplex.refs import parse_version

    try:
        return parse_version(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.violations[0].description) from None


def _target(text: str) -> tuple[int, int]:
    version, equals, weight = text.partition("=")
    is_number = weight.isascii() and weight.isdigit() and len(weight) <= len(str(MAX_WEIGHT))
    if not equals or not is_number or not 1 <= int(weight) <= MAX_WEIGHT:
        raise argparse.ArgumentTypeError(
            f"expected vN=WEIGHT such as v3=90, weights from 1 to {MAX_WEIGHT}, got {text!r}"
        )
    return _version(version), int(weight)


def _print(tag: Tag, as_json: bool) -> None:
    text = f"{tag.tenant}/{tag.name}:{tag.tag} -> {targets_of(tag)}{pending_of(tag)}"
    value = {**dataclasses.asdict(tag), **_first_of(tag.pending or tag.targets)}
    show(value, text, as_json=as_json)


def _first_of(targets: Sequence[TagTarget]) -> dict[str, Any]:
    """The version and digest that `--json` shows; of a split, those of its first target."""
    if not targets:
        return {}
    return {"version": targets[0].version, "digest": targets[0].digest}


async def _tag(args: argparse.Namespace) -> None:
    from loraplex.refs import parse_ref

    async with registry_client(args) as client:
        if args.delete:
            _print(await client.delete_tag(args.ref, args.tag, expect=args.expect), args.json)
            return
        digest = parse_ref(args.ref, field="REF").digest
        version = (await client.get(args.ref)).version
        tag = await client.set_tag(
            f"{version.tenant}/{version.name}",
            args.tag,
            # The registry refuses a digest that it cannot tell the version of.
            {digest or version.version: 1},
            expect=args.expect,
            when_loaded_s=args.when_loaded,
        )
        if tag.pending and args.wait:
            tag = await until_moved(client, version.ref, tag.tag, {version.version: 1})
    _print(tag, args.json)


async def _split(args: argparse.Namespace) -> None:
    from loraplex.errors import InvalidRequest

    targets = dict(args.targets)
    if len(targets) != len(args.targets):
        raise InvalidRequest("vN=WEIGHT: name each version only once", reason="USAGE")
    if args.shadow:
        await shadow.compare(args)
        return
    shadow.check_unused(args)
    async with registry_client(args) as client:
        tag = await client.set_tag(
            args.name, args.tag, targets, expect=args.expect, when_loaded_s=args.when_loaded
        )
        if tag.pending and args.wait:
            ref = f"{tag.tenant}/{tag.name}:v{min(targets)}"
            tag = await until_moved(client, ref, tag.tag, targets)
    _print(tag, args.json)


async def _rollback(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        tag = await client.rollback(args.name, args.tag, args.to)
    _print(tag, args.json)


async def _history(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        moves = await client.tag_history(args.name, args.tag)

    def row(move: TagMove) -> tuple[str, ...]:
        to = spelled(move.targets) or "(deleted)"
        return moment(move.moved_unix_s), move.mover or "-", to

    def object_of(move: TagMove) -> dict[str, Any]:
        return {"tag": args.tag} | _first_of(move.targets) | dataclasses.asdict(move)

    show_table(("MOVED", "BY", "TO"), moves, row, as_json=args.json, object_of=object_of)


async def _delete(args: argparse.Namespace) -> None:
    from loraplex.errors import InvalidRequest

    selected = ":" in args.ref or "@" in args.ref
    if selected == args.all:
        raise InvalidRequest.field(
            "REF", args.ref, "name one version as NAME:vN, or all of them as NAME --all"
        )
    if not args.all and (args.label or args.dry_run):
        raise InvalidRequest.field("--label", args.ref, "--label and --dry-run need --all")
    async with registry_client(args) as client:
        names = await _matching(client, args) if args.all else [args.ref]
        if args.dry_run:
            _print_names(names, args.json)
            return
        deleted = [
            version
            for name in names
            for version in await client.delete(
                name, every=args.all, force=args.force, purge=args.purge
            )
        ]
    for version in deleted:
        show(version, f"deleted {version.ref}", as_json=args.json)


def _print_names(names: Sequence[str], as_json: bool) -> None:
    for name in names:
        tenant, _, short = name.rpartition("/")
        show({"name": short, "tenant": tenant}, f"would delete {name}", as_json=as_json)


async def _matching(client: RegistryClient, args: argparse.Namespace) -> list[str]:
    """The names that the pattern and the labels select; a plain name without labels selects itself.

    Raises: NotFound if nothing matches, InvalidRequest if adapters of several tenants do.
    """
    import fnmatch

    from loraplex.errors import InvalidRequest, NotFound

    is_pattern = any(char in args.ref for char in "*?[")
    if not is_pattern and not args.label:
        return [args.ref]
    tenant, _, pattern = args.ref.rpartition("/")
    found = [
        (version.tenant, version.name)
        async for version in client.list(tenant=tenant, labels=dict(args.label))
        if fnmatch.fnmatchcase(version.name.lower(), pattern.lower())
    ]
    if not found:
        raise NotFound(f"no adapter matches {args.ref!r} and the labels; see 'registry list'")
    tenants = sorted({owner for owner, _ in found})
    if len(tenants) > 1:
        shown = ", ".join(tenants)
        why = f"matches adapters of the tenants {shown}; write TENANT/PATTERN"
        raise InvalidRequest.field("REF", args.ref, why)
    return [f"{owner}/{name}" for owner, name in found]
