"""Flags of `loraplex up`. Defaults come from the variables of the same names."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.errors import InvalidRequest
from loraplex_services.common import env, variables
from loraplex_services.common.addresses import is_loopback
from loraplex_services.common.knob import Knob
from loraplex_services.common.units import Memory, whole

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


LISTENERS = {
    "--http-port": env.HTTP_LISTEN,
    "--grpc-port": env.GATEWAY_LISTEN,
    "--registry-port": env.REGISTRY_LISTEN,
}
"""Which variable stands in for which flag."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Where one server that people reach listens."""

    host: str
    port: int
    """0 = any free one."""


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What to run and where."""

    model: str
    """Absolute folder, hub id or s3:// address."""
    served_model_name: str
    """"" = chosen by the worker."""
    state_dir: Path
    listeners: Mapping[str, Listener]
    """Where to listen, by the flag of the port: --http-port, --grpc-port, --registry-port."""
    metrics_listen: str
    """First of a row of ports, one a child; "" = nowhere."""
    num_workers: int
    device: str
    dtype: str
    attention_backend: str
    model_impl: str
    kv_memory: Memory
    gpu_memory_utilization: float
    """0 = chosen by the worker."""
    max_loras: int
    cluster_size: int
    max_lora_rank: int
    lora_dtype: str
    quantization: str
    kv_cache_dtype: str
    max_model_len: int
    """0 = that of the base."""
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel: int
    fully_sharded_loras: bool
    drain_s: float
    auth: str
    insecure: bool
    log_level: str
    log_format: str


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> UpConfig:
    """Read flags over variables. A repeated flag: the last wins.

    Raises:
        InvalidRequest: a value is wrong; names the flag or the variable.
    """
    args = make_parser().parse_args(argv)
    variables.refuse_unreadable(environ)

    def given(flag: str, knob: Knob[Any]) -> Any:
        text = getattr(args, flag)
        if text is None:
            return knob.read(environ)
        return _parsed("--" + flag.replace("_", "-"), text, knob.parse)

    config = UpConfig(
        model=_model(given("model", env.MODEL)),
        served_model_name=given("served_model_name", env.SERVED_MODEL_NAME),
        state_dir=_state_dir(given("state_dir", env.STATE_DIR), environ),
        listeners={flag: _listener(flag, args, environ) for flag in LISTENERS},
        metrics_listen=_no_socket(env.METRICS_LISTEN, environ),
        num_workers=_num_workers(args.workers, environ),
        device=given("device", env.DEVICE),
        dtype=given("dtype", env.DTYPE),
        attention_backend=given("attention_backend", env.ATTENTION_BACKEND),
        model_impl=given("model_impl", env.MODEL_IMPL),
        kv_memory=given("kv_memory", env.KV_MEMORY),
        gpu_memory_utilization=given("gpu_memory_utilization", env.GPU_MEMORY_UTILIZATION),
        max_loras=given("max_loras", env.MAX_LORAS),
        cluster_size=given("cluster_size", env.CLUSTER_SIZE),
        max_lora_rank=given("max_lora_rank", env.MAX_LORA_RANK),
        lora_dtype=given("lora_dtype", env.LORA_DTYPE),
        quantization=given("quantization", env.QUANTIZATION),
        kv_cache_dtype=given("kv_cache_dtype", env.KV_CACHE_DTYPE),
        max_model_len=given("max_model_len", env.MAX_MODEL_LEN),
        max_num_seqs=given("max_num_seqs", env.MAX_NUM_SEQS),
        max_num_batched_tokens=given("max_num_batched_tokens", env.MAX_NUM_BATCHED_TOKENS),
        tensor_parallel=given("tensor_parallel", env.TENSOR_PARALLEL),
        fully_sharded_loras=args.fully_sharded_loras or env.FULLY_SHARDED_LORAS.read(environ),
        drain_s=given("drain_s", env.DRAIN_S),
        auth=env.AUTH.read(environ),
        insecure=args.insecure or env.INSECURE.read(environ),
        log_level=env.LOG_LEVEL.read(environ),
        log_format=env.LOG_FORMAT.read(environ),
    )
    _check_bind(config)
    variables.check_values(environ, ("registry", "gateway", "worker"))
    return config


def _parsed(flag: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidRequest.field(flag, text, str(error)) from None


def _listener(flag: str, args: argparse.Namespace, environ: Mapping[str, str]) -> Listener:
    """The flags, else the variable, else its default."""
    host, _, port = _no_socket(LISTENERS[flag], environ).rpartition(":")
    given = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return Listener(
        args.host or host.strip("[]"),
        int(port) if given is None else _parsed(flag, given, whole(0, 65535)),
    )


def _no_socket(knob: Knob[str], environ: Mapping[str, str]) -> str:
    listen = knob.read(environ)
    if listen.startswith("unix:"):
        raise InvalidRequest.field(knob.name, listen, "loraplex up needs HOST:PORT")
    return listen


def _num_workers(given: str | None, environ: Mapping[str, str]) -> int:
    """A gateway of its own gets addresses in LORAPLEX_WORKERS; here it is a number, as the flag."""
    if given is not None:
        return int(_parsed("--workers", given, whole(1, 64)))
    return int(_parsed(env.WORKERS.name, environ.get(env.WORKERS.name) or "1", whole(1, 64)))


def _model(model: str) -> str:
    if not model:
        raise InvalidRequest.field(
            "--model",
            model,
            "is needed: a folder with config.json, a GGUF file, a hub id or s3://...",
        )
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file() and len([*folder.glob("*.gguf")]) != 1:
            why = "the folder has no config.json; to serve a GGUF file, name one"
            raise InvalidRequest.field("--model", model, why)
        return str(folder.resolve())
    if folder.suffix == ".gguf" and folder.is_file():
        return str(folder.resolve())
    if model.startswith("s3://") or (_HUB_ID.fullmatch(model) and not folder.parent.is_dir()):
        return model
    raise InvalidRequest.field("--model", model, f"no folder {model}")


def _state_dir(given: Path | None, environ: Mapping[str, str]) -> Path:
    if given is not None:
        return Path(os.path.abspath(given.expanduser()))
    home = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "loraplex"


def _check_bind(config: UpConfig) -> None:
    if config.auth == "keys" or config.insecure:
        return
    for flag, listener in config.listeners.items():
        if not is_loopback(listener.host):
            raise InvalidRequest.field(
                "--host",
                listener.host,
                f"{listener.host} ({LISTENERS[flag].name}) would let other machines in without "
                "a key: set LORAPLEX_AUTH=keys, or add --insecure",
            )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loraplex up",
        description="Run registry, gateway and workers on this machine, in the foreground.",
        epilog="example:\n  loraplex up --model ./llama-3-8b --kv-memory 8GiB",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="DIR|FILE.gguf|HUB_ID|s3://...", help="the base model")
    parser.add_argument("--served-model-name", metavar="ID", help="id that clients use for it")
    parser.add_argument(
        "--state-dir", metavar="DIR", help="adapters and caches live here (~/.local/state/loraplex)"
    )
    parser.add_argument("--host", help="where gateway and registry listen (127.0.0.1)")
    parser.add_argument("--http-port", metavar="PORT", help="OpenAI API (8080); 0 = any free one")
    parser.add_argument("--grpc-port", metavar="PORT", help="gateway gRPC (50051)")
    parser.add_argument("--registry-port", metavar="PORT", help="registry gRPC (50052)")
    parser.add_argument("--workers", metavar="N", help="worker processes (1)")
    parser.add_argument("--device", metavar="NAME", help="auto, cpu or cuda (auto)")
    parser.add_argument("--dtype", metavar="NAME", help="auto, float32, bfloat16, float16 (auto)")
    parser.add_argument(
        "--attention-backend", metavar="NAME", help="auto, vanilla, cpu or triton (auto)"
    )
    parser.add_argument(
        "--model-impl", metavar="NAME", help="model code: auto, native or transformers (auto)"
    )
    parser.add_argument(
        "--kv-memory",
        metavar="BYTES|PERCENT",
        help="whole arena: 24MiB, or 85%% of what is free once the base is loaded (chosen)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="of a GPU's memory, for weights, steps and arena together (0.9)",
    )
    parser.add_argument("--max-loras", metavar="N", help="distinct adapters in a step (no limit)")
    parser.add_argument("--cluster-size", metavar="N", help="adapters from which on they cluster")
    parser.add_argument("--max-lora-rank", metavar="N", help="largest rank accepted (256)")
    parser.add_argument(
        "--lora-dtype",
        metavar="NAME",
        help="of adapters: auto, float32, bfloat16, float16, int8 (auto)",
    )
    parser.add_argument("--quantization", metavar="NAME", help="at load: none, int8, int4 (none)")
    parser.add_argument("--kv-cache-dtype", metavar="NAME", help="of the cache: auto, int8 (auto)")
    parser.add_argument("--max-model-len", metavar="N", help="longest context (the base's)")
    parser.add_argument("--max-num-seqs", metavar="N", help="requests in one step (256)")
    parser.add_argument("--max-num-batched-tokens", metavar="N", help="tokens of a step (2048)")
    parser.add_argument("--tensor-parallel", metavar="N", help="ranks that divide a base (1)")
    parser.add_argument(
        "--fully-sharded-loras", action="store_true", help="ranks divide adapters completely"
    )
    parser.add_argument("--drain-s", metavar="SECONDS", help="longest drain (20)")
    parser.add_argument("--insecure", action="store_true", help="allow --host without keys")
    return parser
