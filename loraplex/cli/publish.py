"""`registry upload` and `registry validate`."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.cli.clients import registry_client
from loraplex.cli.local_base import geometry_of
from loraplex.cli.output import (
    about,
    print_fields,
    print_json,
    print_warnings,
    short_digest,
    show,
    sized,
)
from loraplex.cli.parsing import (
    Commands,
    add_json,
    add_label,
    add_when_loaded,
)
from loraplex.cli.staged import until_moved

if TYPE_CHECKING:
    from loraplex.api.registry import AdapterVersion, Published
    from loraplex.client.publishing import Publication
    from loraplex.client.registry_client import RegistryClient

DIR_HELP = (
    "folder written by PEFT's save_pretrained, snapshot in a Hugging Face cache, or OCI image "
    "layout"
)


def add(commands: Commands) -> None:
    _add_upload(commands)
    _add_validate(commands)


def _add_upload(commands: Commands) -> None:
    parser = commands.add(
        "upload",
        _upload,
        "Publish a PEFT adapter folder as a new version.",
        "registry upload ./out/checkpoint-900 --name acme/support --tag staging\n"
        "  registry upload hf://acme/support-lora@main --name support\n"
        "  registry upload s3://models/support/v7 --name support\n"
        "  registry upload oci://ghcr.io/acme/support:v7 --name support",
    )
    parser.add_argument(
        "dir",
        metavar="DIR|hf://ORG/NAME[@REV]|s3://BUCKET/PREFIX|oci://HOST/REPO:TAG",
        help=DIR_HELP,
    )
    parser.add_argument(
        "--convert",
        action="store_true",
        help="first convert adapter_model.bin, an export of Tinker or another PEFT method to a "
        "PEFT LoRA",
    )
    parser.add_argument(
        "--text-only", action="store_true", help="drop the LoRA weights of vision and audio towers"
    )
    parser.add_argument(
        "--name", required=True, metavar="[TENANT/]NAME", help="name of the adapter"
    )
    parser.add_argument(
        "--tag", action="append", default=[], help="also move this tag; may be repeated"
    )
    parser.add_argument("--no-latest", action="store_true", help="do not move the tag latest")
    parser.add_argument(
        "--base", default="", metavar="ID", help="base that the adapter was trained on"
    )
    parser.add_argument("--public", action="store_true", help="let every tenant run the adapter")
    add_label(parser, about="label of the version")
    parser.add_argument(
        "--parent", default="", metavar="REF", help="version that this one was made from"
    )
    _add_signature(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="only check the adapter; publish nothing"
    )
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    _add_allow_missing(parser)
    add_when_loaded(parser)


def _add_signature(parser: argparse.ArgumentParser) -> None:
    signed = parser.add_mutually_exclusive_group()
    signed.add_argument(
        "--signing-key", type=Path, metavar="PEM", help="EC private key to sign the files with"
    )
    signed.add_argument(
        "--signature",
        type=Path,
        metavar="FILE",
        help="signature of the files (default: model.sig in the folder, if there is one)",
    )


def _add_validate(commands: Commands) -> None:
    parser = commands.add(
        "validate",
        _validate,
        "Run the checks of an upload on an adapter folder, offline.",
        "registry validate ./out/checkpoint-900 --base ./llama-3-8b",
        server="",
    )
    parser.add_argument("dir", metavar="DIR", help=DIR_HELP)
    parser.add_argument(
        "--base", default="", metavar="DIR|ID", help="base to check the adapter against"
    )
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    _add_allow_missing(parser)
    add_json(parser)


def _add_allow_missing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="accept an adapter that has no tensors for some modules that its config selects",
    )


def _upload(args: argparse.Namespace) -> None:
    import asyncio

    from loraplex.cli.sources import adapter_folder
    from loraplex.client.publishing import Publication

    publication = Publication(
        args.name,
        tags=args.tag,
        latest=not args.no_latest,
        base_id=args.base,
        public=args.public,
        labels=dict(args.label),
        strict=args.strict,
        allow_missing=args.allow_missing,
        parent=args.parent,
        when_loaded_s=args.when_loaded,
        signing_key=args.signing_key,
        signature=args.signature,
    )
    # Fetching blocks. Outside of the event loop, an interrupt ends it immediately.
    with adapter_folder(
        args.dir,
        convert=args.convert,
        text_only=args.text_only,
        strict=args.strict,
        base=args.base,
    ) as folder:
        asyncio.run(_upload_folder(args, folder, publication))


async def _upload_folder(args: argparse.Namespace, folder: Path, publication: Publication) -> None:
    from loraplex.cli.progress import ProgressBar

    async with registry_client(args) as client:
        if args.dry_run:
            await _dry_run(client, args, folder, publication)
            return
        with ProgressBar(args.name) as bar:
            published = await client.upload(folder, publication, bar)
        print_warnings(published.warnings)
        if not (args.when_loaded and args.wait):
            _print_published(published, args.json)
        elif args.json:
            try:
                await _until_tagged(client, args, published.version)
            finally:  # One object, with the tags as they are now; also where the wait has failed.
                version = (await client.get(published.version.ref)).version
                _print_published(replace(published, version=version), as_json=True)
        else:
            _print_published(published, as_json=False)
            await _until_tagged(client, args, published.version)


async def _until_tagged(
    client: RegistryClient, args: argparse.Namespace, version: AdapterVersion
) -> None:
    for tag in [*args.tag, *([] if args.no_latest else ["latest"])]:
        await until_moved(client, version.ref, tag, {version.version: 1})


def _print_published(published: Published, as_json: bool) -> None:
    version = published.version
    value = {
        **about(version),
        "tags": version.tags,
        "base_id": version.base_id,
        "created": published.created,
        "warnings": published.warnings,
    }
    verb = "published" if published.created else "already published as"
    text = f"{verb} {version.ref} {short_digest(version.digest)} ({sized(version.size_bytes)})"
    show(value, text, as_json=as_json)


async def _dry_run(
    client: RegistryClient, args: argparse.Namespace, folder: Path, publication: Publication
) -> None:
    checked = await client.check(folder, publication)
    print_warnings(checked.warnings)
    text = f"would be accepted for base {checked.base_id} (rank {checked.max_rank})"
    show({"name": publication.name, **asdict(checked)}, text, as_json=args.json)


def _validate(args: argparse.Namespace) -> None:
    from loraplex.adapter_format import (
        core_manifest,
        digest_of,
        parse_header,
        validate,
    )
    from loraplex.adapter_format.tensor_scan import scan_file, warnings_of_zeros
    from loraplex.client.publishing import left_behind, read_adapter
    from loraplex.errors import InvalidAdapter, InvalidRequest
    from loraplex.sources import is_remote

    if is_remote(args.dir):
        why = "only folders can be checked offline; use `registry upload --dry-run` for an address"
        raise InvalidRequest.field("DIR", args.dir, why)
    folder = read_adapter(Path(args.dir))
    left_out = left_behind(Path(args.dir), strict=args.strict)
    geometry = geometry_of(args.base)
    report = validate(
        folder.config_bytes,
        folder.header_prefix,
        folder.tensor_file_size,
        folder.files,
        geometry,
        strict=args.strict,
        base_names=[Path(args.base).name] if args.base else [],
        allow_missing=args.allow_missing,
    )
    header = parse_header(folder.header_prefix, folder.tensor_file_size)
    zero_tensors = scan_file(folder.tensor_path, header)
    found = (*report.warnings, *warnings_of_zeros(report, zero_tensors))
    if args.strict and found:
        raise InvalidAdapter.of(found)
    warnings = (*left_out, *found)
    print_warnings(warnings)
    fingerprint = geometry.fingerprint if geometry else ""
    digest = digest_of(core_manifest(report, folder.files, fingerprint)) if geometry else None
    if args.json:
        print_json(
            {
                "name": Path(args.dir).resolve().name,
                "digest": digest,
                "max_rank": report.max_rank,
                "num_modules": report.num_modules,
                "warnings": warnings,
            }
        )
        return
    against = args.base or "no base: shapes and module names were not compared"
    print_fields(
        {
            "adapter": args.dir,
            "base": against,
            "rank": str(report.max_rank),
            "modules": str(report.num_modules),
            "digest": digest or "",
            "result": "valid",
        }
    )
