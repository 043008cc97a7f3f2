"""`registry certify`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.cli.catalog import certified
from loraplex.cli.clients import credentials_of, gateway_client, registry_client
from loraplex.cli.output import about, show
from loraplex.cli.parsing import REF_FORMS, Commands, number
from loraplex.printable import printable

if TYPE_CHECKING:
    from loraplex.api.registry import AdapterVersion, Certificate
    from loraplex.errors import LoraplexError


def add(commands: Commands) -> None:
    parser = commands.add(
        "certify",
        _certify,
        "Measure how far a version on the served base diverges from a reference, and record "
        "the result.",
        "registry certify acme/support:v3 --reference 127.0.0.1:51051 --max-kl 0.05 --tag prod",
    )
    parser.add_argument("ref", metavar="REF", nargs="?", default="", help=REF_FORMS)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="certify every version that has no certificate of this measurement, then every new "
        "one; --tag moves forward only",
    )
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


def _nats(text: str) -> float:
    return number(text, lambda value: 0 <= value < float("inf"), "a number of at least 0")


async def _certify(args: argparse.Namespace) -> None:
    from loraplex.client.certifier import Certifier
    from loraplex.client.divergence import PROBE_TEXTS, probe_of
    from loraplex.client.inference_client import InferenceClient
    from loraplex.errors import InvalidRequest

    if args.follow == bool(args.ref) or (args.follow and args.reference_model):
        why = "must be a version, or --follow for all, which have the same names on the reference"
        raise InvalidRequest.field("REF", args.ref, why)
    texts = probe_of(Path(args.probe).read_text()) if args.probe else PROBE_TEXTS
    async with (
        registry_client(args) as registry,
        gateway_client(args) as served,
        InferenceClient(args.reference, credentials_of(args)) as reference,
    ):
        certifier = Certifier(
            registry, served, reference, args.reference, texts, args.max_kl, args.tag
        )
        if args.follow:
            await certifier.follow(partial(_report, args.json))
            return
        version = (await registry.get(args.ref)).version
        certificate = await certifier.certify(version, args.reference_model)
    _report(args.json, version, certificate)


def _report(as_json: bool, version: AdapterVersion, outcome: Certificate | LoraplexError) -> None:
    """Print one line about a version: its certificate, or why it has none."""
    from loraplex.api.registry import Certificate

    if isinstance(outcome, Certificate):
        found, error, text = outcome, None, certified(outcome)
    else:
        found, error, text = None, str(outcome), f"not certified: {printable(str(outcome))}"
    value = {**about(version), "certificate": found, "error": error}
    show(value, f"{version.ref} {text}", as_json=as_json)
