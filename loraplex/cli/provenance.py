"""`registry sign`, `registry verify` and `registry export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.cli.clients import registry_client
from loraplex.cli.output import about, short_digest, show
from loraplex.cli.parsing import REF_FORMS, Commands

if TYPE_CHECKING:
    from loraplex.api.registry import AdapterVersion


def add(commands: Commands) -> None:
    parser = commands.add(
        "sign",
        _sign,
        "Sign the files of a version and store the signature with it.",
        "registry sign acme/support:v3 --signing-key cosign.pem",
    )
    parser.add_argument("ref", metavar="REF", help=REF_FORMS)
    parser.add_argument(
        "--signing-key", required=True, metavar="PEM", help="EC private key (P-256, P-384, P-521)"
    )
    parser.add_argument("--out", metavar="FILE", help="also write the signature bundle to FILE")
    parser = commands.add(
        "verify",
        _verify,
        "Check that a version is signed with a given key, or as its tenant requires.",
        "registry verify acme/support:prod --public-key release.pem",
    )
    parser.add_argument("ref", metavar="REF", help=REF_FORMS)
    parser.add_argument(
        "--public-key",
        metavar="PEM",
        help="EC public key (default: the keys that the tenant requires)",
    )
    parser = commands.add(
        "export",
        _export,
        "Write a version as an OCI image layout; 'registry upload DIR' reads it back.",
        "registry export acme/support:v3 ./support-oci",
    )
    parser.add_argument("ref", metavar="REF", help=REF_FORMS)
    parser.add_argument("dir", metavar="DIR", help="new or empty folder")
    parser.add_argument(
        "--format",
        choices=("modelpack", "oci"),
        default="modelpack",
        help="modelpack: CNCF ModelPack (default); oci: a plain OCI artifact",
    )


async def _sign(args: argparse.Namespace) -> None:
    from loraplex.signature_bundle import parse_bundle
    from loraplex.signing import sign

    async with registry_client(args) as client:
        version = (await client.get(args.ref)).version
        bundle, public = sign(version.ref, _files(version), Path(args.signing_key))
        if args.out:  # before the registry changes: the path may be wrong
            Path(args.out).write_bytes(bundle)
        # By number: a tag may have moved since.
        await client.attach_signature(version.ref, bundle, public)
    _print(args, version, parse_bundle(bundle).key_sha256, "signed")


async def _export(args: argparse.Namespace) -> None:
    from loraplex.cli.progress import ProgressBar

    async with registry_client(args) as client:
        with ProgressBar(args.ref) as bar:
            version, manifest = await client.export(
                args.ref, args.dir, form=args.format, progress=bar
            )
    value = {**about(version), "format": args.format, "manifest_digest": manifest}
    text = f"{version.ref} written to {args.dir} as {args.format}, manifest {manifest}"
    show(value, text, as_json=args.json)


async def _verify(args: argparse.Namespace) -> None:
    from loraplex.errors import InvalidRequest, PermissionDenied
    from loraplex.signing import key_sha256, parse_public_key, public_key, verify

    async with registry_client(args) as client:
        signed = await client.signatures(args.ref)
    version = signed.version
    if args.public_key:
        keys = [public_key(Path(args.public_key))]
    else:
        keys = [parse_public_key(pem.encode(), "policy", pem) for pem in signed.policy_keys]
    if not keys:
        description = f"tenant {version.tenant!r} requires no signature; pass --public-key"
        raise InvalidRequest.field("--public-key", "", description)
    signer = next((sha256 for key in keys if (sha256 := key_sha256(key)) in signed.bundles), None)
    if signer is None:
        wanted = ", ".join(key_sha256(key)[:12] for key in keys)
        others = ", ".join(sha256[:12] for sha256 in signed.bundles) or "nobody"
        message = f"{version.ref} is not signed by {wanted}; signed by {others}"
        raise PermissionDenied(message, reason="NOT_SIGNED")
    verify(
        signed.bundles[signer],
        _files(version),
        next(key for key in keys if key_sha256(key) == signer),
    )
    _print(args, version, signer, "is signed")


def _files(version: AdapterVersion) -> dict[str, str]:
    return {file.path: file.sha256 for file in version.files}


def _print(args: argparse.Namespace, version: AdapterVersion, signer: str, verb: str) -> None:
    text = f"{version.ref} {short_digest(version.digest)} {verb} by key {signer[:12]}"
    show({**about(version), "key_sha256": signer}, text, as_json=args.json)
