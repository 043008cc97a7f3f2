"""Turns the flags of `up` into the environment of each child."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import loraplex_services
from loraplex.errors import InvalidRequest
from loraplex_services.common.settings import env, switches
from loraplex_services.up.flags import LISTENERS, Listener, UpConfig
from loraplex_services.up.ports import address_of
from loraplex_services.up.state import StateDir

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
_ANY_ADDRESS = {"0.0.0.0": LOOPBACK, "::": "[::1]", "": LOOPBACK}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child process."""

    name: str
    """Name in logs: "registry", "gateway", "worker-0"..."""
    module: str
    environ: Mapping[str, str]
    health: str
    """gRPC address whose `readiness` says that it is up."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses for users, in the order of LISTENERS."""

    http: str
    grpc: str
    registry: str


def child_specs(
    config: UpConfig, addresses: Addresses, state: StateDir, environ: Mapping[str, str]
) -> list[ChildSpec]:
    """Children in the order in which they drain: gateway, workers, registry."""
    shared = _shared(config, state, environ)
    workers = [_worker(config, index, state, shared) for index in range(config.num_workers)]
    registry = ChildSpec(
        "registry",
        "loraplex_services.registry",
        {
            **shared,
            "LORAPLEX_REGISTRY_LISTEN": addresses.registry,
            "LORAPLEX_STATE_DIR": str(state.path),
            "LORAPLEX_METADATA": environ.get("LORAPLEX_METADATA") or "embedded",
        },
        _reachable(addresses.registry),
    )
    gateway = ChildSpec(
        "gateway",
        "loraplex_services.gateway",
        {
            **shared,
            "LORAPLEX_GATEWAY_LISTEN": addresses.grpc,
            "LORAPLEX_HTTP_LISTEN": addresses.http,
            "LORAPLEX_REGISTRY_ADDRESS": registry.health,
            "LORAPLEX_WORKERS": ",".join(worker.health for worker in workers),
            env.DEBUG.name: _debug_of_gateway(environ),
            **_present(environ, "LORAPLEX_METADATA"),
        },
        _reachable(addresses.grpc),
    )
    specs = [gateway, *workers, registry]
    return _with_metrics(specs, config.metrics_listen)


def addresses_of(listeners: Mapping[str, Listener]) -> Addresses:
    """The addresses that result from the chosen ports."""
    return Addresses(
        *(address_of(listeners[flag].host, listeners[flag].port) for flag in LISTENERS)
    )


def _with_metrics(specs: list[ChildSpec], listen: str) -> list[ChildSpec]:
    """The specs with a metrics address for each child: consecutive ports, beginning with that of
    `listen`; port 0 means any port for each."""
    if not listen:
        return specs
    host, _, port = listen.rpartition(":")
    first, last = int(port), int(port) + len(specs) - 1
    if first and last > MAX_PORT:
        why = f"takes the ports {first} to {last}, but the highest port is {MAX_PORT}"
        raise InvalidRequest.field(env.METRICS_LISTEN.name, listen, why)
    ports = range(first, last + 1) if first else [0] * len(specs)
    return [
        replace(spec, environ={**spec.environ, env.METRICS_LISTEN.name: f"{host}:{port}"})
        for spec, port in zip(specs, ports, strict=True)
    ]


def _worker(config: UpConfig, index: int, state: StateDir, shared: Mapping[str, str]) -> ChildSpec:
    name = f"worker-{index}"
    listen = f"unix:{state.sockets / f'{name}.sock'}"
    environ = {
        **shared,
        "TMPDIR": str(state.scratch),
        "LORAPLEX_WORKER_LISTEN": listen,
        "LORAPLEX_STATE_DIR": str(state.cache / name),
        **config.worker,
    }
    return ChildSpec(name, "loraplex_services.worker", environ, listen)


def _shared(config: UpConfig, state: StateDir, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of every child: the user's own variables, except those that are set here."""
    private = (
        "LORAPLEX_METRICS_LISTEN",
        "LORAPLEX_METADATA",
        "LORAPLEX_WORKERS",
        # Those of the tools in this shell: within one machine services talk in plain.
        *("LORAPLEX_CA", "LORAPLEX_CERT", "LORAPLEX_KEY"),
    )
    shared = {name: value for name, value in environ.items() if name not in private}
    root = str(Path(loraplex_services.__path__[0]).parent)
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    shared["PYTHONSAFEPATH"] = "1"
    shared.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes on forks tell users nothing
    shared["LORAPLEX_OBJECTS"] = environ.get("LORAPLEX_OBJECTS") or f"file://{state.objects}"
    shared["LORAPLEX_DRAIN_S"] = f"{config.drain_s:g}"
    shared["LORAPLEX_AUTH"] = config.auth
    if config.auth == "keys" and not environ.get("LORAPLEX_SERVICE_TOKEN_FILE"):
        shared["LORAPLEX_SERVICE_TOKEN_FILE"] = str(_service_token(state))
    return shared


def _service_token(state: StateDir) -> Path:
    """A secret with which the services of this stack authenticate to each other."""
    path = state.sockets / "service-token"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
    return path


def _debug_of_gateway(environ: Mapping[str, str]) -> str:
    """Bases in a state folder of the stack's own belong to the stack; those elsewhere may not."""
    own = f"{switches.REPLACE_BASES.name}={'false' if environ.get('LORAPLEX_OBJECTS') else 'true'}"
    return ",".join(filter(None, (environ.get(env.DEBUG.name), own)))


def _present(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: environ[name] for name in names if environ.get(name)}


def _reachable(address: str) -> str:
    """The address by which children on this machine reach a listening address."""
    host, _, port = address.rpartition(":")
    return f"{_ANY_ADDRESS.get(host.strip('[]'), host)}:{port}"
