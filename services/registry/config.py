"""The registry's configuration, read once from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common import env


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """What a registry process needs to know."""

    listen: tuple[str, ...]
    """Addresses of the gRPC door, HOST:PORT or unix:/path."""
    metrics_listen: str
    objects_url: str
    metadata_url: str
    """A Redis URL, or "embedded"."""
    state_dir: Path
    auth: str
    """"off" or "keys"."""
    insecure: bool
    admin_key_file: Path | None
    service_token_file: Path | None
    drain_s: float
    failpoints: str


def from_env(environ: Mapping[str, str]) -> RegistryConfig:
    """Raises InvalidRequest naming the variable that is wrong."""
    state_dir = env.STATE_DIR.read(environ) or default_state_dir(environ)
    objects_url = env.OBJECTS.read(environ) or (state_dir / "objects").absolute().as_uri()
    return RegistryConfig(
        listen=tuple(part.strip() for part in env.REGISTRY_LISTEN.read(environ).split(",")),
        metrics_listen=env.METRICS_LISTEN.read(environ),
        objects_url=objects_url,
        metadata_url=env.METADATA.read(environ),
        state_dir=state_dir,
        auth=env.AUTH.read(environ),
        insecure=env.INSECURE.read(environ),
        admin_key_file=env.ADMIN_KEY_FILE.read(environ),
        service_token_file=env.SERVICE_TOKEN_FILE.read(environ),
        drain_s=env.DRAIN_S.read(environ),
        failpoints=env.FAILPOINTS.read(environ),
    )


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/loraplex`."""
    home = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "loraplex"
