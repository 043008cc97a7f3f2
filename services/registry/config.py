"""The registry's configuration, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplex.errors import InvalidRequest
from loraplex_services.common.security.tls import TlsFiles, tls_files
from loraplex_services.common.settings import env, switches, variables


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """The settings of a registry process."""

    listen: str
    """Address of the gRPC API, HOST:PORT or unix:/path."""
    service_listen: str
    """One more address, for services that show a certificate; "" = none."""
    service_names: tuple[str, ...]
    """Names in the certificates of services; empty = any certificate of the CA is one."""
    tls: TlsFiles
    metrics_listen: str
    objects_url: str
    metadata_url: str
    """A Redis URL, or "embedded"."""
    state_dir: Path
    auth: str
    """"off", "keys", or "insecure": other machines may connect without keys."""
    admin_key_file: Path | None
    service_token_file: Path | None
    drain_s: float
    max_ephemeral_bytes: int | None
    """Bytes of one tenant's ephemeral versions; None = no limit."""
    gc_interval_s: float
    """Seconds between collections; 0 = no automatic collection."""
    failpoint: str
    """STEP or STEP:COUNT at which a test ends the process; "" = none."""


def from_env(environ: Mapping[str, str]) -> RegistryConfig:
    """Raises InvalidRequest naming the variable that is wrong."""
    state_dir = env.STATE_DIR.read(environ) or variables.default_state_dir(environ)
    objects_url = env.OBJECTS.read(environ) or (state_dir / "objects").absolute().as_uri()
    tls = tls_files(environ)
    listen, service_listen = _listeners(environ, tls)
    return RegistryConfig(
        listen=listen,
        service_listen=service_listen,
        service_names=env.SERVICE_NAMES.read(environ),
        tls=tls,
        metrics_listen=env.METRICS_LISTEN.read(environ),
        objects_url=objects_url,
        metadata_url=env.METADATA.read(environ),
        state_dir=state_dir,
        auth=env.AUTH.read(environ),
        admin_key_file=env.ADMIN_KEY_FILE.read(environ),
        service_token_file=env.SERVICE_TOKEN_FILE.read(environ),
        drain_s=env.DRAIN_S.read(environ),
        max_ephemeral_bytes=env.EPHEMERAL_BYTES.read(environ),
        gc_interval_s=switches.GC_INTERVAL_S.read(environ),
        failpoint=switches.FAILPOINT.read(environ),
    )


def _listeners(environ: Mapping[str, str], tls: TlsFiles) -> tuple[str, str]:
    """The address for everyone, and the one for services only, "" if there is none."""
    listen = env.REGISTRY_LISTEN.read(environ)
    everyone, comma, rest = listen.partition(",")
    scheme, _, services = rest.strip().partition(":")
    if comma and (scheme != "mtls" or "," in services):
        description = "expected one address, or ADDRESS,mtls:HOST:PORT"
        raise InvalidRequest.field(env.REGISTRY_LISTEN.name, listen, description)
    if services and not tls.proves_services:
        description = f"mtls: needs {env.CA.name}, {env.CERT.name} and {env.KEY.name}"
        raise InvalidRequest.field(env.REGISTRY_LISTEN.name, listen, description)
    return everyone.strip(), services
