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
            env.REGISTRY_LISTEN.name: addresses.registry,
            env.STATE_DIR.name: str(state.path),
            env.METADATA.name: environ.get(env.METADATA.name) or "embedded",
        },
        _reachable(addresses.registry),
    )
    gateway = ChildSpec(
        "gateway",
        "loraplex_services.gateway",
        {
            **shared,
            env.GATEWAY_LISTEN.name: addresses.grpc,
            env.HTTP_LISTEN.name: addresses.http,
            env.REGISTRY_ADDRESS.name: registry.health,
            env.WORKERS.name: ",".join(worker.health for worker in workers),
            env.DEBUG.name: _debug_of_gateway(environ),
            env.METADATA.name: environ.get(env.METADATA.name, ""),
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
        env.WORKER_LISTEN.name: listen,
        env.STATE_DIR.name: str(state.cache / name),
        **config.worker,
    }
    return ChildSpec(name, "loraplex_services.worker", environ, listen)


def _shared(config: UpConfig, state: StateDir, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of every child: the user's own variables, except those that are set here."""
    private = (
        env.METRICS_LISTEN.name,
        env.METADATA.name,
        env.WORKERS.name,
        # Those of the tools in this shell: within one machine services talk in plain.
        env.CA.name,
        env.CERT.name,
        env.KEY.name,
    )
    shared = {name: value for name, value in environ.items() if name not in private}
    root = str(Path(loraplex_services.__path__[0]).parent)
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    shared["PYTHONSAFEPATH"] = "1"
    shared.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes on forks tell users nothing
    shared[env.OBJECTS.name] = environ.get(env.OBJECTS.name) or f"file://{state.objects}"
    shared[env.DRAIN_S.name] = f"{config.drain_s:g}"
    shared[env.AUTH.name] = config.auth
    if config.auth == "keys" and not environ.get(env.SERVICE_TOKEN_FILE.name):
        shared[env.SERVICE_TOKEN_FILE.name] = str(_service_token(state))
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
    own = f"{switches.REPLACE_BASES.name}={'false' if environ.get(env.OBJECTS.name) else 'true'}"
    return ",".join(filter(None, (environ.get(env.DEBUG.name), own)))


def _reachable(address: str) -> str:
    """The address by which children on this machine reach a listening address."""
    host, _, port = address.rpartition(":")
    return f"{_ANY_ADDRESS.get(host.strip('[]'), host)}:{port}"
