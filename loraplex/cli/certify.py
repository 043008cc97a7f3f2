"""`registry certify`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.cli.catalog import certified
from loraplex.cli.output import print_json
from loraplex.cli.parsing import REF_FORMS, add_command, add_connection, credentials_of
from loraplex.cli.publish import client_of

if TYPE_CHECKING:
    from loraplex.api.registry import Certificate


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "certify",
        _certify,
        "Measure how far a version on the served base diverges from a reference, and record "
        "the result.",
        "registry certify acme/support:v3 --reference 127.0.0.1:51051 --max-kl 0.05 --tag prod",
    )
    parser.add_argument("ref", metavar="REF", help=REF_FORMS)
    parser.add_argument(
        "--reference",
        required=True,
        metavar="HOST:PORT",
        help="gateway of a stack that serves the adapter on the dequantised or original base",
    )
    parser.add_argument(
        "--reference-model",
        default="",
        metavar="REF",
        help="name of the version on the reference (default: REF)",
    )
    parser.add_argument(
        "--gateway",
        metavar="HOST:PORT",
        help="gateway that serves the version (default: LORAPLEX_GATEWAY_ADDRESS)",
    )
    parser.add_argument(
        "--probe",
        metavar="FILE",
        help="texts to score, separated by empty lines (default: built-in texts)",
    )
    parser.add_argument(
        "--max-kl",
        type=_nats,
        metavar="NATS",
        help="refuse the version, with exit code 3, if the mean divergence per token is larger",
    )
    parser.add_argument(
        "--tag", default="", metavar="TAG", help="point this tag at the version if it passes"
    )
    add_connection(parser, "registry")


def _nats(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0")
    return value


async def _certify(args: argparse.Namespace) -> None:
    from loraplex.client.certifying import PROBE_TEXTS, probe_of
    from loraplex.errors import InvalidAdapter, Violation

    texts = probe_of(Path(args.probe).read_text()) if args.probe else PROBE_TEXTS
    async with client_of(args) as registry:
        version = (await registry.get(args.ref)).version
        measured = await _measured(args, version.ref, version.base_id, texts)
        certificate = await registry.admin.set_certificate(version.ref, measured)
        if args.max_kl is not None and certificate.mean_kl > args.max_kl:
            why = f"is above --max-kl {args.max_kl:g}: {certified(certificate)}"
            kl = f"KL {certificate.mean_kl:.3g}"
            raise InvalidAdapter.of([Violation.of(version.ref, kl, why)])
        if args.tag:
            name = f"{version.tenant}/{version.name}"
            await registry.set_tag(name, args.tag, {version.version: 1})
    if args.json:
        print_json(certificate)
        return
    print(f"{version.ref} {certified(certificate)}")


async def _measured(
    args: argparse.Namespace, ref: str, base_id: str, texts: tuple[str, ...]
) -> Certificate:
    from loraplex.api.registry import Certificate
    from loraplex.client.certifying import measure, probe_sha256, served_quantization
    from loraplex.client.inference_client import InferenceClient

    credentials = credentials_of(args)
    theirs = args.reference_model or ref
    async with (
        InferenceClient(args.gateway, credentials) as served,
        InferenceClient(args.reference, credentials) as reference,
    ):
        quantization = await served_quantization(served, base_id)
        found = await measure(served, reference, ref, theirs, texts)
    return Certificate(
        base_id=base_id,
        reference=f"{theirs} at {args.reference}",
        probe_sha256=probe_sha256(texts),
        num_tokens=found.num_tokens,
        mean_kl=found.mean_kl,
        max_kl=found.max_kl,
        top1_agreement=found.top1_agreement,
        quantization=quantization,
    )
