"""`registry list`, `show`, `pull`, `diff` and `watch`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loraplex.cli.clients import registry_client
from loraplex.cli.output import (
    about,
    moment,
    print_fields,
    print_json,
    short_digest,
    show,
    show_table,
    sized,
)
from loraplex.cli.parsing import REF_FORMS, Commands, add_label, count
from loraplex.units import counted

if TYPE_CHECKING:
    from loraplex.api.registry import AdapterVersion, Certificate, Change, Tag, TagTarget
    from loraplex.client.registry_client import RegistryClient


def add(commands: Commands) -> None:
    parser = commands.add(
        "list",
        _list,
        "List the adapters that you may see.",
        "registry list --label team=support --json",
    )
    parser.add_argument("name", nargs="?", default="", help="list all versions of this adapter")
    parser.add_argument("--tenant", default="", help="only adapters of this tenant")
    parser.add_argument("--prefix", default="", help="only names that begin with PREFIX")
    add_label(parser, about="only adapters with this label")
    parser.add_argument("--base", default="", metavar="ID", help="only adapters of this base")
    parser.add_argument(
        "--all", action="store_true", help="list every version, not only the latest"
    )
    parser.add_argument(
        "--sort",
        choices=_ORDERS,
        default="name",
        help="order of the list: name (default), newest, largest or highest rank first",
    )
    parser.add_argument("--limit", type=count, default=0, metavar="N", help="list only the first N")
    _add_others(commands)


def _add_others(commands: Commands) -> None:
    parser = commands.add(
        "show", _show, "Show one version and its tags.", "registry show acme/support:prod"
    )
    parser.add_argument("ref", metavar="REF", help=REF_FORMS)

    parser = commands.add(
        "pull",
        _pull,
        "Download the files of a version.",
        "registry pull acme/support:v3 ./support-v3",
    )
    parser.add_argument("ref", metavar="REF", help=REF_FORMS)
    parser.add_argument("dir", metavar="DIR", help="new or empty folder")
    parser.add_argument(
        "--force",
        action="store_true",
        help="write into a folder that is not empty, replacing files",
    )

    parser = commands.add(
        "diff",
        _diff,
        "Compare the config, files and labels of two versions.",
        "registry diff support:v2 support:v3",
    )
    parser.add_argument("ref", metavar="REF", help=REF_FORMS)
    parser.add_argument("other", metavar="REF", help="version to compare it with")

    parser = commands.add(
        "watch",
        _watch,
        "Print every change as it happens.",
        "registry watch --json | jq .digest",
    )
    parser.add_argument(
        "--resume", default="", metavar="TOKEN", help="continue after the event with this token"
    )


_ORDERS: dict[str, Callable[[AdapterVersion], Any]] = {
    "name": lambda version: (version.tenant, version.name, version.version),
    "created": lambda version: -version.created_unix_s,
    "size": lambda version: -version.size_bytes,
    "rank": lambda version: -version.max_rank,
}


async def _list(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        owner, _, name = args.name.rpartition("/")
        tenant = args.tenant or owner
        versions = client.list(
            tenant=tenant,
            name=name,
            name_prefix=args.prefix,
            labels=dict(args.label),
            base_id=args.base,
            all_versions=args.all or bool(args.name),
        )
        found = await _ordered(versions, args.sort, args.limit)
        if name and not (found or args.prefix or args.label or args.base):
            await client.get(f"{tenant}/{name}" if tenant else name)  # raises NotFound, with a hint
    header = ("NAME", "VERSION", "TAGS", "DIGEST", "RANK", "SIZE", "BASE", "CREATED", "CREATOR")
    show_table(header, found, _row, as_json=args.json)


async def _ordered(
    versions: AsyncIterator[AdapterVersion], order: str, limit: int
) -> list[AdapterVersion]:
    """Collect versions in `order`. They arrive by name, so that order reads no more than needed."""
    found: list[AdapterVersion] = []
    async for version in versions:
        found.append(version)
        if order == "name" and len(found) == limit:
            break
    found.sort(key=_ORDERS[order])
    return found[:limit] if limit else found


def _row(version: AdapterVersion) -> tuple[str, ...]:
    return (
        f"{version.tenant}/{version.name}",
        f"v{version.version}",
        ",".join(version.tags),
        short_digest(version.digest),
        str(version.max_rank),
        sized(version.size_bytes),
        version.base_id,
        moment(version.created_unix_s),
        version.creator,
    )


async def _show(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        found = await client.get(args.ref)
        # By number: a tag may have moved since.
        version = (await client.signatures(found.version.ref)).version
        certificates = await client.admin.certificates(found.version.ref)
    if args.json:
        others = {"adapter_tags": found.tags, "certificates": certificates}
        print_json({**dataclasses.asdict(version), **others})
        return
    print_fields(
        {
            "adapter": version.ref,
            "description": version.description,
            "adapter labels": spelled_labels(version.adapter_labels),
            "digest": version.digest,
            "base": version.base_id,
            "task": _task_of(version),
            "rank": str(version.max_rank),
            "modules": str(version.num_modules),
            "size": sized(version.size_bytes),
            "created": moment(version.created_unix_s),
            "creator": version.creator,
            "visibility": version.visibility,
            "labels": spelled_labels(version.labels),
            "parent": version.parent,
            "rope scaling": version.rope_scaling,
            "EOS ids": ", ".join(map(str, version.eos_token_ids)),
            "peft": version.peft_version,
            "signers": ", ".join(sha256[:12] for sha256 in version.signers),
        }
    )
    if found.tags:
        print("tags")
        for tag in found.tags:
            print(f"  {tag.tag} -> {targets_of(tag)}{pending_of(tag)}")
    if certificates:
        print("certificates")
        for certificate in certificates:
            print(f"  {certified(certificate)}")
    print("files")
    for file in version.files:
        print(f"  {file.path}  {sized(file.size_bytes)}  sha256:{file.sha256[:12]}")
    for warning in version.warnings:
        print(f"warning: {warning.field} = {warning.value}: {warning.description}")


def spelled_labels(labels: Mapping[str, str]) -> str:
    """`team=support, env=prod`."""
    return ", ".join(f"{key}={value}" for key, value in labels.items())


def certified(certificate: Certificate) -> str:
    """A certificate as one line of text."""
    by = ", by the operator" if certificate.by_operator else ""
    scheme = f" in {certificate.quantization}" if certificate.quantization else ""
    return (
        f"{certificate.base_id}{scheme} against {certificate.reference}: "
        f"mean KL {certificate.mean_kl:.2g} nats per token, largest {certificate.max_kl:.2g}; "
        f"same top token at {certificate.top1_agreement:.1%} of {certificate.num_tokens} positions "
        f"({moment(certificate.created_unix_s)}{by})"
    )


def _task_of(version: AdapterVersion) -> str:
    """The task of an adapter; empty for a causal language model, as nearly all are."""
    if version.task == "CAUSAL_LM":
        return ""
    if not version.num_labels:
        return version.task
    return f"{version.task}, {counted(version.num_labels, 'label')}"


def pending_of(tag: Tag) -> str:
    """The target of a staged move, or the reason why the move failed."""
    if tag.pending:
        coming = " ".join(f"v{target.version}" for target in tag.pending)
        return f" (pending {coming}: {tag.pending_reason})"
    return f" ({tag.pending_reason})" if tag.pending_reason else ""


def targets_of(tag: Tag) -> str:
    """The targets of a tag, or a word that says why it has none."""
    nothing = "nothing" if tag.pending or tag.pending_reason else "(deleted)"
    return spelled(tag.targets) or nothing


def spelled(targets: Sequence[TagTarget]) -> str:
    """`v3`, or `v3:90 v4:10` for a split."""
    if len(targets) == 1:
        return f"v{targets[0].version}"
    return " ".join(f"v{target.version}:{target.weight}" for target in targets)


async def _pull(args: argparse.Namespace) -> None:
    from loraplex.cli.progress import ProgressBar

    async with registry_client(args) as client:
        with ProgressBar(args.ref) as bar:
            version = await client.pull(args.ref, args.dir, force=args.force, progress=bar)
    text = f"pulled {version.ref} {short_digest(version.digest)} into {args.dir}"
    show(version, text, as_json=args.json)


async def _diff(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        old = (await client.get(args.ref)).version
        new = (await client.get(args.other)).version
        changes = _changes(await _facts(client, old), await _facts(client, new))
    lines = [f"{change['field']}: {change['old']} -> {change['new']}" for change in changes]
    named = {**about(new), "old": about(old), "changes": changes}
    show(named, "\n".join(lines) or "no differences", as_json=args.json)


async def _facts(client: RegistryClient, version: AdapterVersion) -> dict[str, str]:
    """All facts in which two versions can differ, by field path."""
    import json

    facts = {"digest": version.digest, "base": version.base_id, "rank": str(version.max_rank)}
    facts |= {f"labels.{key}": value for key, value in version.labels.items()}
    for file in version.files:
        facts[f"files.{file.path}"] = f"{file.size_bytes} bytes sha256:{file.sha256[:12]}"
    config = json.loads(await client.read_file(version.ref, "adapter_config.json"))
    facts |= {f"config.{key}": json.dumps(value, sort_keys=True) for key, value in config.items()}
    return facts


def _changes(old: dict[str, str], new: dict[str, str]) -> list[dict[str, str]]:
    fields = [*old, *(field for field in new if field not in old)]
    return [
        {"field": field, "old": old.get(field, ""), "new": new.get(field, "")}
        for field in fields
        if old.get(field) != new.get(field)
    ]


async def _watch(args: argparse.Namespace) -> None:
    async with registry_client(args) as client:
        async for change in client.watch(args.resume):
            show(_change_object(change), _change_line(change), as_json=args.json)


def _change_object(change: Change) -> dict[str, Any]:
    """The change with name, version and digest at the top level; of a split, its first target's."""
    adapter = change.version or change.tag
    target = change.version or (
        change.tag.targets[0] if change.tag and change.tag.targets else None
    )
    return {
        "kind": change.kind,
        "tenant": adapter.tenant if adapter else None,
        "name": adapter.name if adapter else None,
        "version": target.version if target else None,
        "digest": target.digest if target else None,
        "base_id": change.base_id,
        "adapter": change.version,
        "tag": change.tag,
        "resume_token": change.resume_token,
    }


def _change_line(change: Change) -> str:
    if change.version is not None:
        verb = "deleted" if change.version.deleted else "published"
        return f"{verb} {change.version.ref} {short_digest(change.version.digest)}"
    if change.tag is not None:
        tag = change.tag
        return f"tag {tag.tenant}/{tag.name}:{tag.tag} -> {targets_of(tag)}"
    return f"base {change.base_id}" if change.kind == "base" else "snapshot begins"
