"""A worker's settings, read once from its environment."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplex.errors import InvalidRequest
from loraplex.refs import check_base_id, folder_name
from loraplex_services.common.security.addresses import is_local
from loraplex_services.common.security.service_token import read_service_token
from loraplex_services.common.security.tls import TlsFiles, tls_files
from loraplex_services.common.settings import env, switches
from loraplex_services.worker.scheduling.limits import MAX_STEP_S
from loraplex_services.worker.types.messages import EngineConfig
from loraplex_services.worker.types.nodes import ONE_NODE, Nodes

MAX_RESIDENT = 4096
"""Slots of the device tables: adapters loaded at once, if they fit into memory."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything that the API server process needs to know."""

    listen: str
    metrics_listen: str
    worker_id: str
    model: str
    """The base as the user wrote it: folder, hub id or s3:// address."""
    base_id: str
    objects_url: str
    cache_dir: Path | None
    """None = a temporary folder, which is deleted when the worker ends."""
    cache_bytes: int | None
    """Largest size of the disk cache; None = by the free space."""
    drain_s: float
    step_timeout_s: float
    service_token: str
    """The token that callers must show; "" = none."""
    service_names: tuple[str, ...]
    """The names in the certificates of services; empty = any certificate of the CA is accepted."""
    tls: TlsFiles
    engine: EngineConfig
    """The configuration of the engine process, without the folder of the base."""
    node_rank: int = 0
    """Number of this machine among those of the worker; the first one serves."""

    @property
    def base_aliases(self) -> tuple[str, ...]:
        """Other names by which adapters may refer to the base: its default name, because PEFT
        writes the hub id or the folder that an adapter was trained on. Folder names such as `model`
        or `checkpoint-100` are left out, because they say nothing about the base."""
        name = base_id_of(self.model)
        parts = re.split("[-_.]", name.lower())
        is_generic = all(part.isdigit() or part in _GENERIC for part in parts)
        return () if is_generic or name == self.base_id else (name,)

    @property
    def max_request_adapters(self) -> int:
        """Adapters in one request: a set must fit a step, and leave slots for others."""
        return min(MAX_RESIDENT // 2, self.engine.max_loras or MAX_RESIDENT)


_GENERIC = frozenset(
    {"base", "best", "checkpoint", "ckpt", "epoch", "final", "global", "hf", "iter", "last"}
    | {"latest", "llm", "main", "merged", "model", "output", "snapshot", "step", "weights"}
)
"""Words of folder names that say nothing about the model."""


def from_env(environ: Mapping[str, str]) -> WorkerConfig:
    """Read all settings. Raises InvalidRequest naming the variable that is wrong or missing."""
    model = env.MODEL.read(environ)
    if not model:
        raise InvalidRequest.field("LORAPLEX_MODEL", "", "must name the base model to serve")
    objects_url = env.OBJECTS.read(environ)
    if not objects_url:
        raise InvalidRequest.field(
            "LORAPLEX_OBJECTS", "", "must name the object store: file:///path or s3://bucket/prefix"
        )
    base_id = env.SERVED_MODEL_NAME.read(environ) or base_id_of(model)
    tls = tls_files(environ)
    service_token = _service_token(environ, tls)
    return WorkerConfig(
        listen=env.WORKER_LISTEN.read(environ),
        metrics_listen=env.METRICS_LISTEN.read(environ),
        worker_id=_worker_id(env.WORKER_LISTEN.read(environ)),
        model=model,
        base_id=check_base_id(base_id, field=env.SERVED_MODEL_NAME.name),
        objects_url=objects_url,
        cache_dir=env.STATE_DIR.read(environ),
        cache_bytes=env.CACHE_BYTES.read(environ),
        drain_s=env.DRAIN_S.read(environ),
        step_timeout_s=switches.STEP_TIMEOUT_S.read(environ),
        service_token=service_token,
        service_names=env.SERVICE_NAMES.read(environ),
        tls=tls,
        engine=_engine(environ, _nodes(environ, service_token)),
        node_rank=env.NODE_RANK.read(environ),
    )


def _nodes(environ: Mapping[str, str], token: str) -> Nodes:
    """The machines that share the base. Raises InvalidRequest."""
    count, node_rank = env.NNODES.read(environ), env.NODE_RANK.read(environ)
    address, num_ranks = env.MASTER_ADDR.read(environ), env.TENSOR_PARALLEL.read(environ)
    if node_rank >= count:
        why = f"must be less than {env.NNODES.name}, which is {count}"
        raise InvalidRequest.field(env.NODE_RANK.name, node_rank, why)
    if count == 1:
        return ONE_NODE
    if num_ranks % count:
        why = f"must divide {env.TENSOR_PARALLEL.name}, which is {num_ranks}"
        raise InvalidRequest.field(env.NNODES.name, count, why)
    if not address or address.startswith("unix:") or address.endswith(":0"):
        why = "must be HOST:PORT of the first machine, with a port of your choice"
        raise InvalidRequest.field(env.MASTER_ADDR.name, address, why)
    if not token:
        why = (
            f"{env.NNODES.name}={count} needs the service token, which is the same on all machines"
        )
        raise InvalidRequest.field(env.SERVICE_TOKEN_FILE.name, "", why)
    return Nodes(count, address, token)


def _engine(environ: Mapping[str, str], nodes: Nodes) -> EngineConfig:
    kv_memory, lora_memory = env.KV_MEMORY.read(environ), env.LORA_MEMORY.read(environ)
    max_num_batched_tokens = env.MAX_NUM_BATCHED_TOKENS.read(environ)
    return EngineConfig(
        device=env.DEVICE.read(environ),
        dtype=env.DTYPE.read(environ),
        cpu_isa=env.CPU_ISA.read(environ),
        attention_backend=env.ATTENTION_BACKEND.read(environ),
        model_impl=env.MODEL_IMPL.read(environ),
        load_format=switches.LOAD_FORMAT.read(environ),
        arena_bytes=kv_memory.num_bytes,
        arena_share=kv_memory.share,
        gpu_memory_utilization=env.GPU_MEMORY_UTILIZATION.read(environ) or 0.0,
        max_lora_rank=env.MAX_LORA_RANK.read(environ),
        max_resident=MAX_RESIDENT,
        max_loras=env.MAX_LORAS.read(environ),
        lora_bytes=lora_memory.num_bytes,
        lora_share=lora_memory.share or 1.0,
        max_model_len=env.MAX_MODEL_LEN.read(environ) or 0,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=min(env.MAX_NUM_SEQS.read(environ), max_num_batched_tokens),
        max_step_s=MAX_STEP_S,
        cluster_size=env.CLUSTER_SIZE.read(environ) or 0,
        prefix_cache=switches.PREFIX_CACHE.read(environ),
        overlap=switches.OVERLAP.read(environ),
        drafts=switches.SPECULATION.read(environ),
        host_cache_bytes=env.HOST_CACHE_BYTES.read(environ) or 0,
        lora_dtype=env.LORA_DTYPE.read(environ),
        quantization=env.QUANTIZATION.read(environ),
        kv_cache_dtype=env.KV_CACHE_DTYPE.read(environ),
        tensor_parallel=env.TENSOR_PARALLEL.read(environ),
        nodes=nodes,
        fully_sharded_loras=env.FULLY_SHARDED_LORAS.read(environ),
    )


def _worker_id(listen: str) -> str:
    """The name of the worker in logs and responses: that of its socket, which is its own, or that
    of its host and a random suffix."""
    if listen.startswith("unix:"):
        return Path(listen.removeprefix("unix:")).stem
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


def _service_token(environ: Mapping[str, str], tls: TlsFiles) -> str:
    """The token. Raises InvalidRequest if other machines could connect without credentials."""
    token = read_service_token(env.SERVICE_TOKEN_FILE.read(environ))
    listen = env.WORKER_LISTEN.read(environ)
    known = token or tls.proves_services
    auth = env.AUTH.read(environ)
    if auth == "keys" and not known and not listen.startswith("unix:"):
        raise InvalidRequest.field(
            env.SERVICE_TOKEN_FILE.name,
            "",
            f"{env.AUTH.name}=keys needs the service token that gateways show, or a certificate "
            f"({env.CA.name}, {env.CERT.name}, {env.KEY.name}): every process of this machine "
            "could use the worker",
        )
    if not (known or is_local(listen) or auth == "insecure"):
        raise InvalidRequest.field(
            env.WORKER_LISTEN.name,
            listen,
            f"listening beyond loopback needs {env.SERVICE_TOKEN_FILE.name}, or certificates "
            f"({env.CA.name}, {env.CERT.name}, {env.KEY.name}), or {env.AUTH.name}=insecure",
        )
    return token


def base_id_of(model: str) -> str:
    """Id of a base by default: the hub id as it is, else the last name of the folder or file."""
    if Path(model).exists() or model.startswith(("/", ".", "s3://")):
        return folder_name(model.removeprefix("s3://")).removesuffix(".gguf")
    return model
