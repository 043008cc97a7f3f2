"""The gateway's settings, read once from the environment."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.errors import InvalidRequest
from loraplex_services.common.security.addresses import is_local
from loraplex_services.common.security.service_token import read_service_token
from loraplex_services.common.security.tls import PLAIN, TlsFiles, http_tls_files, tls_files
from loraplex_services.common.settings import env, switches
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.text.chat_style import StyleSettings


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of one gateway process."""

    grpc_listen: str
    """HOST:PORT or unix:/path of the gRPC API."""
    http_listen: str
    """HOST:PORT of the HTTP API."""
    metrics_listen: str
    """HOST:PORT of a separate server for /metrics and probes; "" = none."""
    registry_address: str
    workers: tuple[str, ...]
    """HOST:PORT, unix:/path, or dns:NAME:PORT."""
    max_request_s: float
    drain_s: float
    allowed_hosts: tuple[str, ...]
    auth: str
    """"off", "keys", or "insecure": other machines may connect without keys."""
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    service_token: str = ""
    tls: TlsFiles = PLAIN
    """TLS of the gRPC API, and of calls to the registry and workers."""
    http_tls: TlsFiles = PLAIN
    """TLS of the HTTP API."""
    gateway_id: str = ""
    chat_style: StyleSettings = field(default_factory=StyleSettings)
    replaces_bases: bool = False
    """True if a base replaces a registered one with the same id and another geometry."""
    lora_root: Path | None = None
    """Folder from which `/v1/load_lora_adapter` may publish; None = the call is not served."""
    objects_url: str = ""
    """Object store for files and batch jobs; "" = neither is served."""
    metadata_url: str = ""
    """Redis that several gateways share; "" = this is the only gateway."""

    @property
    def wants_keys(self) -> bool:
        """True if every call needs an API key."""
        return self.auth == "keys"

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the APIs."""
        return all(is_local(listen) for listen in (self.grpc_listen, self.http_listen))


def from_env(environ: Mapping[str, str]) -> GatewayConfig:
    """Read and check. Raises: InvalidRequest naming the variable."""
    config = GatewayConfig(
        grpc_listen=env.GATEWAY_LISTEN.read(environ),
        http_listen=env.HTTP_LISTEN.read(environ),
        metrics_listen=env.METRICS_LISTEN.read(environ),
        registry_address=env.REGISTRY_ADDRESS.read(environ),
        workers=env.WORKERS.read(environ),
        max_request_s=env.MAX_REQUEST_S.read(environ),
        drain_s=env.DRAIN_S.read(environ),
        allowed_hosts=env.ALLOWED_HOSTS.read(environ),
        auth=env.AUTH.read(environ),
        tls=tls_files(environ),
        http_tls=http_tls_files(environ),
        service_token=read_service_token(env.SERVICE_TOKEN_FILE.read(environ)),
        chat_style=StyleSettings(
            switches.TOOL_CALL_PARSER.read(environ), switches.REASONING_PARSER.read(environ)
        ),
        replaces_bases=switches.REPLACE_BASES.read(environ),
        lora_root=env.LORA_ROOT.read(environ),
        objects_url=env.OBJECTS.read(environ),
        metadata_url=_shared_url(env.METADATA.read(environ)),
        gateway_id=f"{socket.gethostname()}-{secrets.token_hex(4)}",
    )
    _check(config)
    return config


def _check(config: GatewayConfig) -> None:
    if not config.workers:
        raise InvalidRequest.field(
            env.WORKERS.name, "", "list at least one worker: HOST:PORT, unix:/path or dns:NAME:PORT"
        )
    for worker in config.workers:
        _check_worker(worker)
    if config.wants_keys and not (config.service_token or config.tls.proves_services):
        raise InvalidRequest.field(
            env.SERVICE_TOKEN_FILE.name,
            "",
            f"{env.AUTH.name}=keys needs the service token that the registry accepts, or a "
            f"certificate ({env.CA.name}, {env.CERT.name}, {env.KEY.name})",
        )
    if config.auth == "off" and not config.is_local:
        raise InvalidRequest.field(
            env.HTTP_LISTEN.name,
            f"{config.http_listen}, {config.grpc_listen}",
            f"other machines could reach it without auth: set {env.AUTH.name}=keys, or "
            f"{env.AUTH.name}=insecure to allow that",
        )


def _check_worker(worker: str) -> None:
    if worker.startswith("unix:/"):
        return
    host, _, port = worker.removeprefix("dns:").lstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidRequest.field(
            env.WORKERS.name, worker, "must be HOST:PORT, unix:/path or dns:NAME:PORT"
        )


def _shared_url(metadata: str) -> str:
    """An embedded server belongs to the registry on this machine: there is only one gateway."""
    return "" if metadata == "embedded" else metadata
