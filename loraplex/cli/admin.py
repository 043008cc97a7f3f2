"""`registry base`, `audit`, `gc` and `reindex`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from loraplex.cli.clients import registry_client
from loraplex.cli.output import moment, short_digest, show, show_table, sized
from loraplex.cli.parsing import Commands, count
from loraplex.refs import folder_name
from loraplex.units import counted

if TYPE_CHECKING:
    from loraplex.api.registry import AuditEntry, BaseModel


def add(commands: Commands) -> None:
    _add_bases(commands)
    parser = commands.add(
        "audit", _audit, "Show who changed what, newest first.", "registry audit --json"
    )
    parser.add_argument("--tenant", default="", help="show only changes of this tenant")
    parser.add_argument(
        "--limit",
        type=count,
        metavar="N",
        default=100,
        help="largest number of entries, 0 for all (default: 100)",
    )

    parser = commands.add(
        "gc",
        _gc,
        "Delete the bytes of abandoned uploads, and of versions deleted a week ago or earlier.",
        "registry gc --dry-run",
    )
    parser.add_argument("--dry-run", action="store_true", help="only count what would be deleted")

    parser = commands.add(
        "reindex", _reindex, "Rebuild the index from the objects.", "registry reindex"
    )


def _add_bases(commands: Commands) -> None:
    group = commands.group(
        "base", "Manage the bases that adapters are checked against.", "registry base list"
    )
    parser = group.add(
        "add",
        _base_add,
        "Register a base from its folder. No weights are sent.",
        "registry base add ./llama-3-8b --id meta-llama/Meta-Llama-3-8B",
    )
    parser.add_argument("dir", metavar="DIR", help="folder with config.json")
    parser.add_argument(
        "--id", default="", metavar="ID", help="id of the base (default: the folder's name)"
    )
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of the base; may be repeated",
    )
    parser.add_argument(
        "--max-lora-rank",
        type=count,
        metavar="N",
        default=0,
        help="largest rank that is accepted (default: 256)",
    )
    parser.add_argument(
        "--replace", action="store_true", help="replace a base that is registered under this id"
    )
    parser = group.add("list", _base_list, "List registered bases.", "registry base list")


async def _base_add(args: argparse.Namespace) -> None:
    base_id = args.id or folder_name(args.dir)
    async with registry_client(args) as client:
        base = await client.admin.add_base(
            args.dir,
            base_id,
            aliases=args.alias,
            max_lora_rank=args.max_lora_rank,
            replace=args.replace,
        )
    text = f"recorded {base.base_id} ({base.model_type}, {short_digest(base.fingerprint)})"
    show(_base_object(base), text, as_json=args.json)


def _base_object(base: BaseModel) -> dict[str, Any]:
    return {"name": base.base_id, "digest": base.fingerprint, **dataclasses.asdict(base)}


async def _base_list(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        bases = await client.admin.bases()
    header = ("BASE", "TYPE", "LAYERS", "FINGERPRINT", "ALIASES")
    show_table(header, bases, _base_row, as_json=args.json, object_of=_base_object)


def _base_row(base: BaseModel) -> tuple[str, ...]:
    fingerprint, aliases = short_digest(base.fingerprint), ",".join(base.aliases)
    return base.base_id, base.model_type, str(base.num_layers), fingerprint, aliases


async def _audit(args: argparse.Namespace) -> None:
    shown: list[AuditEntry] = []
    async with registry_client(args) as client:
        async for entry in client.admin.audit(args.tenant):
            shown.append(entry)
            if len(shown) == args.limit:
                break
        is_named = not args.json and any(entry.actor for entry in shown)
        keys = await client.admin.keys(args.tenant) if is_named else ()
    names = {key.key_id: f"{key.key_id} ({key.description})" for key in keys if key.description}

    def row(entry: AuditEntry) -> tuple[str, ...]:
        by = names.get(entry.actor, entry.actor or "-")
        return moment(entry.time_unix_s), by, entry.action, entry.subject

    header = ("TIME", "BY", "ACTION", "SUBJECT")
    show_table(header, shown, row, as_json=args.json, object_of=_entry_object)


def _entry_object(entry: AuditEntry) -> dict[str, Any]:
    """An entry with the name and the version of the adapter that it is about, if there is one."""
    path, _, selector = entry.subject.partition(":")
    name = path.partition("/")[2] or None
    number = selector.removeprefix("v")
    version = int(number) if number.isdecimal() and number != selector else None
    return {"name": name, "version": version, **dataclasses.asdict(entry)}


async def _gc(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        done = await client.admin.collect_garbage(dry_run=args.dry_run)
    verb = "would delete" if args.dry_run else "deleted"
    freed = sized(done.deleted_bytes)
    text = f"{verb} {counted(done.deleted_objects, 'object')} ({freed}), kept {done.kept_objects}"
    show(done, text, as_json=args.json)


async def _reindex(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        done = await client.admin.reindex()
    parts = ((done.versions, "version"), (done.tags, "tag"), (done.bases, "base"))
    text = f"indexed {', '.join(counted(*part) for part in parts)}"
    show(done, text, as_json=args.json)
