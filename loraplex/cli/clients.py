"""The clients of the servers that the connection flags of a command name."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.client.inference_client import InferenceClient
    from loraplex.client.registry_client import RegistryClient
    from loraplex.client.settings import Credentials


def registry_client(args: argparse.Namespace) -> RegistryClient:
    """Of `--registry`."""
    from loraplex.client.registry_client import RegistryClient

    return RegistryClient(args.registry, credentials_of(args))


def gateway_client(args: argparse.Namespace) -> InferenceClient:
    """Of `--gateway`."""
    from loraplex.client.inference_client import InferenceClient

    return InferenceClient(args.gateway, credentials_of(args))


def credentials_of(args: argparse.Namespace) -> Credentials:
    """Credentials from the environment, overridden by flags."""
    from loraplex.client import settings
    from loraplex.errors import InvalidRequest

    flags = {"ca": args.ca, "cert": args.cert, "key": args.key}
    for flag, path in flags.items():
        if path and not os.path.isfile(path):
            raise InvalidRequest.field(f"--{flag}", path, "no such file")
    given = {f"LORAPLEX_{flag.upper()}": path for flag, path in flags.items() if path}
    return settings.credentials({**os.environ, **given})
