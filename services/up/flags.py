"""Flags of `loraplex up`. Defaults come from the variables of the same names."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.cli.parsing import Parser
from loraplex.errors import InvalidRequest
from loraplex_services.common.security.addresses import is_loopback
from loraplex_services.common.settings import env, switches, variables
from loraplex_services.common.settings.setting import MAX_SHOWN, Setting
from loraplex_services.common.units import integer

_VARIABLE = re.compile(r"\bLORAPLEX_([A-Z_]+)\b(?!=)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


LISTENERS = {
    "--http-port": env.HTTP_LISTEN,
    "--grpc-port": env.GATEWAY_LISTEN,
    "--registry-port": env.REGISTRY_LISTEN,
}
"""The variable that corresponds to each flag."""
WORKER_SETTINGS = tuple(s for s in env.ALL_SETTINGS if s.readers == "up worker")
"""Variables of workers that flags of the same names set."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The listening address of one server for users."""

    host: str
    port: int
    """0 = any free port."""


@dataclass(frozen=True, slots=True)
class UpConfig:
    """The stack to run, and its addresses."""

    state_dir: Path
    listeners: Mapping[str, Listener]
    """Listening addresses by the flag of the port: --http-port, --grpc-port, --registry-port."""
    metrics_listen: str
    """The first of consecutive ports, one for each child; "" = none."""
    num_workers: int
    worker: Mapping[str, str]
    """Variables of workers for which flags were given; the base is always one of them."""
    drain_s: float
    auth: str
    log_level: str
    log_format: str


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> UpConfig:
    """Read flags over variables. A repeated flag: the last wins.

    Raises:
        InvalidRequest: a value is wrong; names the flag or the variable.
    """
    args = make_parser().parse_args(argv)
    variables.check_switches(environ)

    def given(flag: str, setting: Setting[Any]) -> Any:
        text = getattr(args, flag)
        if text is None:
            return setting.read(environ)
        return _parsed("--" + flag.replace("_", "-"), text, setting.parse)

    worker = {}
    for setting in WORKER_SETTINGS:
        flag = setting.name.removeprefix("LORAPLEX_").lower()
        given(flag, setting)  # raises for the flag, or else for the variable
        if getattr(args, flag) is not None:
            worker[setting.name] = getattr(args, flag)
    worker[env.MODEL.name] = _model(given("model", env.MODEL))
    config = UpConfig(
        state_dir=_state_dir(given("state_dir", env.STATE_DIR), environ),
        listeners={flag: _listener(flag, args, environ) for flag in LISTENERS},
        metrics_listen=_no_socket(env.METRICS_LISTEN, environ),
        num_workers=_num_workers(args.workers, environ),
        worker=worker,
        drain_s=given("drain_s", env.DRAIN_S),
        auth=_auth(given("insecure", env.INSECURE), environ),
        log_level=switches.LOG_LEVEL.read(environ),
        log_format=switches.LOG_FORMAT.read(environ),
    )
    _check_bind(config)
    variables.check_values(environ, ("registry", "gateway", "worker"))
    _check_metadata(env.METADATA.read(environ))
    return config


def named_as_given(message: str, argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """A child's message with the names of variables replaced by their flags. A variable keeps its
    name if it was set and the flag was not given.
    """
    given = vars(make_parser().parse_args(argv))

    def name(match: re.Match[str]) -> str:
        flag = match[1].lower()
        if flag not in given or (given[flag] is None and environ.get(match[0])):
            return match[0]
        return "--" + flag.replace("_", "-")

    return _VARIABLE.sub(name, message)


def _parsed(flag: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidRequest.field(flag, text, f"{error}, got {text[:MAX_SHOWN]!r}") from None


def _listener(flag: str, args: argparse.Namespace, environ: Mapping[str, str]) -> Listener:
    """The value of the flag, else of the variable, else the default."""
    host, _, port = _no_socket(LISTENERS[flag], environ).rpartition(":")
    given = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return Listener(
        (args.host or host).strip("[]"),
        int(port) if given is None else _parsed(flag, given, integer(0, 65535)),
    )


def _no_socket(setting: Setting[str], environ: Mapping[str, str]) -> str:
    listen = setting.read(environ)
    if listen.startswith("unix:") or "," in listen:
        raise InvalidRequest.field(setting.name, listen, "loraplex up needs HOST:PORT")
    return listen


def _num_workers(given: str | None, environ: Mapping[str, str]) -> int:
    """A separate gateway gets addresses in LORAPLEX_WORKERS; here it is a number, like the flag."""
    if given is not None:
        return int(_parsed("--workers", given, integer(1, 64)))
    return int(_parsed(env.WORKERS.name, environ.get(env.WORKERS.name) or "1", integer(1, 64)))


def _model(model: str) -> str:
    """The model with an absolute path. Links are kept, because a base has the name of the link."""
    if not model:
        raise InvalidRequest.field(
            "--model",
            model,
            "is required: a folder with config.json, a GGUF file, a hub id or s3://...",
        )
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file() and len([*folder.glob("*.gguf")]) != 1:
            why = "the folder has no config.json; to serve a GGUF file, name one"
            raise InvalidRequest.field("--model", model, why)
        return str(folder.absolute())
    if folder.suffix == ".gguf" and folder.is_file():
        return str(folder.absolute())
    if model.startswith("s3://") or (_HUB_ID.fullmatch(model) and not folder.parent.is_dir()):
        return model
    raise InvalidRequest.field("--model", model, f"no folder {model}")


def _state_dir(given: Path | None, environ: Mapping[str, str]) -> Path:
    if given is not None:
        return Path(os.path.abspath(given.expanduser()))
    return variables.default_state_dir(environ)


def _auth(insecure: bool, environ: Mapping[str, str]) -> str:
    """The value of LORAPLEX_AUTH; `insecure` allows other machines, but takes no keys away."""
    auth = env.AUTH.read(environ)
    return "insecure" if insecure and auth != "keys" else auth


def _check_metadata(url: str) -> None:
    if url != "embedded":
        from loraplex_services.common.redis_url import connect_redis

        connect_redis(url)  # raises for a bad address; connects when it is first used


def _check_bind(config: UpConfig) -> None:
    if config.auth != "off":
        return
    for flag, listener in config.listeners.items():
        if not is_loopback(listener.host):
            raise InvalidRequest.field(
                "--host",
                listener.host,
                f"{listener.host} ({LISTENERS[flag].name}) would accept other machines without "
                "a key: set LORAPLEX_AUTH=keys, or add --insecure",
            )


_FLAGS = {
    "base and arithmetic": (
        ("--model", "DIR|FILE.gguf|HUB_ID|s3://...", "base model (required)"),
        ("--served-model-name", "ID", "id that clients use for the base"),
        ("--device", "NAME", "auto, cpu or cuda (default: auto)"),
        ("--dtype", "NAME", "arithmetic: auto, float32, bfloat16 or float16 (default: auto)"),
        (
            "--lora-dtype",
            "NAME",
            "storage of adapters: a type as in --dtype, or int8 (default: auto)",
        ),
        ("--quantization", "NAME", "quantise on load: none, int8, int4 or fp8 (default: none)"),
        (
            "--kv-cache-dtype",
            "NAME",
            "storage of the KV cache: int8, fp8, the dtype of the base, or auto (default: auto)",
        ),
        (
            "--attention-backend",
            "NAME",
            "auto, vanilla, cpu, triton, flashinfer or a package's (default: auto)",
        ),
        ("--model-impl", "NAME", "model code: auto, native or transformers (default: auto)"),
        ("--tensor-parallel", "N", "number of processes that divide a base (default: 1)"),
        (
            "--fully-sharded-loras",
            None,
            "divide both matrices of each adapter among these processes",
        ),
    ),
    "memory and limits": (
        (
            "--kv-memory",
            "BYTES|PERCENT",
            "memory for KV cache and adapters, such as 24MiB, or 85%% of the free memory",
        ),
        ("--lora-memory", "BYTES|PERCENT", "largest part of it for adapters (default: all of it)"),
        ("--gpu-memory-utilization", "SHARE", "share of a GPU's memory to use (default: 0.9)"),
        ("--max-model-len", "N", "longest context in tokens (default: that of the base)"),
        ("--max-num-seqs", "N", "largest number of requests in one step (default: 256)"),
        ("--max-num-batched-tokens", "N", "largest number of tokens in one step (default: 2048)"),
        ("--max-loras", "N", "largest number of adapters in one step (default: no limit)"),
        (
            "--cluster-size",
            "N",
            "once N adapters run, serve requests for these first (default: never)",
        ),
        ("--max-lora-rank", "N", "largest rank that is accepted (default: 256)"),
    ),
    "processes and addresses": (
        ("--host", "HOST", "address on which gateway and registry listen (default: 127.0.0.1)"),
        ("--http-port", "PORT", "port of the HTTP API; 0 = any free port (default: 8080)"),
        ("--grpc-port", "PORT", "gRPC port of the gateway (default: 50051)"),
        ("--registry-port", "PORT", "gRPC port of the registry (default: 50052)"),
        ("--workers", "N", "number of worker processes (default: 1)"),
        ("--state-dir", "DIR", "folder for adapters and caches (default: ~/.local/state/loraplex)"),
        (
            "--drain-s",
            "SECONDS",
            "seconds in which running requests may finish after SIGTERM (default: 20)",
        ),
        ("--insecure", None, "allow --host beyond loopback without API keys"),
    ),
}
"""Flags by the heading of the help: name, placeholder (None = without a value), help."""


def make_parser() -> Parser:
    parser = Parser(
        prog="loraplex up",
        description="Run registry, gateway and workers on this machine, in the foreground.",
        epilog="example:\n  loraplex up --model ./llama-3-8b --kv-memory 8GiB",
    )
    for heading, flags in _FLAGS.items():
        group = parser.add_argument_group(heading)
        for name, metavar, text in flags:
            if metavar is None:
                group.add_argument(name, action="store_const", const="true", help=text)
            else:
                group.add_argument(name, metavar=metavar, help=text)
    return parser
