"""The table of all LORAPLEX_* variables: name, type, default, readers and meaning.

A service reads its settings in its `config.py` and reads the environment nowhere else. No name ends
in _PORT or _HOST, because Kubernetes injects such names. docs/reference/settings.md is generated
from this table.
"""

from __future__ import annotations

from loraplex.units import parse_seconds
from loraplex_services.common.settings.setting import (
    DEBUG_LIST,
    Setting,
    bytes_setting,
    choice_setting,
    count_setting,
    flag_setting,
    listen_setting,
    path_setting,
    text_setting,
)
from loraplex_services.common.units import (
    ATTENTION_GROUP,
    Memory,
    choice,
    integer,
    parse_list,
    parse_memory,
    parse_model,
    parse_share,
    parse_some_seconds,
    parse_store_url,
    parse_text,
)

# Addresses and credentials of clients
REGISTRY_ADDRESS = text_setting(
    "LORAPLEX_REGISTRY_ADDRESS", "tools gateway", "Address of the registry.", "127.0.0.1:50052"
)
GATEWAY_ADDRESS = text_setting(
    "LORAPLEX_GATEWAY_ADDRESS", "tools", "gRPC address of the gateway.", "127.0.0.1:50051"
)
_KEY = "API key that is sent with every call."
API_KEY: Setting[str] = Setting("LORAPLEX_API_KEY", parse_text, "", "tools", _KEY, secret=True)
CA = path_setting("LORAPLEX_CA", "tools all", "PEM file of the CA against which peers are checked.")
CERT = path_setting(
    "LORAPLEX_CERT", "tools all", "PEM file of the certificate that is sent to peers."
)
KEY = path_setting("LORAPLEX_KEY", "tools all", "PEM file of the certificate's private key.")

# Every server
STATE_DIR = path_setting(
    "LORAPLEX_STATE_DIR",
    "up registry worker",
    "Folder for state, by default ${XDG_STATE_HOME:-~/.local/state}/loraplex. On a worker, the "
    "folder of the disk cache, by default in a temporary folder.",
)
METRICS_LISTEN = listen_setting(
    "LORAPLEX_METRICS_LISTEN",
    "up all",
    "Address for /metrics, /healthz and /readyz; with `loraplex up`, one port for each child.",
)
DRAIN_S: Setting[float] = Setting(
    "LORAPLEX_DRAIN_S",
    parse_seconds,
    20.0,
    "up all",
    "Time in which running requests may finish after SIGTERM, in seconds.",
)
_LISTED = "Comma-separated switches for developers, NAME or NAME=VALUE; listed below."
DEBUG: Setting[tuple[str, ...]] = Setting(DEBUG_LIST, parse_list, (), "up all", _LISTED)

# Who may call
AUTH = choice_setting(
    "LORAPLEX_AUTH",
    "off keys insecure",
    "up registry gateway worker",
    "`keys` requires an API key from every caller. With `off`, servers listen on loopback only; "
    "with `insecure`, they may listen anywhere without keys.",
)
INSECURE = flag_setting(
    "LORAPLEX_INSECURE", "up", "Allow listening beyond loopback without API keys."
)
ADMIN_KEY_FILE = path_setting(
    "LORAPLEX_ADMIN_KEY_FILE",
    "registry",
    "File that holds the first admin key, `lpx_<id>_<secret>`.",
)
ALLOWED_HOSTS: Setting[tuple[str, ...]] = Setting(
    "LORAPLEX_ALLOWED_HOSTS",
    parse_list,
    (),
    "gateway",
    "Host headers, besides loopback, that are accepted without API keys.",
)
SERVICE_TOKEN_FILE = path_setting(
    "LORAPLEX_SERVICE_TOKEN_FILE",
    "all",
    "File with the secret with which services authenticate to each other.",
)
SERVICE_NAMES: Setting[tuple[str, ...]] = Setting(
    "LORAPLEX_SERVICE_NAMES",
    parse_list,
    (),
    "registry worker",
    "Names that certificates of services must have; unset = any, if LORAPLEX_CA signed them.",
)
HTTP_CERT = path_setting(
    "LORAPLEX_HTTP_CERT",
    "up gateway",
    "PEM file of the HTTP server's certificate chain, with the private key in it or next to it, "
    "as `tls.key` next to `tls.crt`; unset = plain HTTP.",
)

# Registry: where adapters are stored
REGISTRY_LISTEN = listen_setting(
    "LORAPLEX_REGISTRY_LISTEN",
    "up registry",
    "Address of the gRPC server. `,mtls:HOST:PORT` after it adds one for services only, which need "
    "a certificate signed by LORAPLEX_CA.",
    "127.0.0.1:50052",
)
OBJECTS: Setting[str] = Setting(
    "LORAPLEX_OBJECTS",
    parse_store_url,
    "",
    "registry gateway worker",
    "Object store: file:///path or s3://bucket/prefix. A gateway without it serves no files and "
    "batch jobs.",
)
METADATA = text_setting(
    "LORAPLEX_METADATA",
    "registry gateway",
    "Redis or Valkey: redis://, rediss://, redis+sentinel://, or `embedded` for a private server.",
    "embedded",
)
EPHEMERAL_BYTES = bytes_setting(
    "LORAPLEX_EPHEMERAL_BYTES",
    "registry",
    "Largest size of a tenant's ephemeral adapters, such as those of task ids; the least recently "
    "used ones are deleted first; unset = no limit.",
)

# Gateway: which requests are accepted
GATEWAY_LISTEN = listen_setting(
    "LORAPLEX_GATEWAY_LISTEN", "up gateway", "Address of the gRPC server.", "127.0.0.1:50051"
)
HTTP_LISTEN = listen_setting(
    "LORAPLEX_HTTP_LISTEN", "up gateway", "Address of the HTTP server.", "127.0.0.1:8080"
)
WORKERS: Setting[tuple[str, ...]] = Setting(
    "LORAPLEX_WORKERS",
    parse_list,
    (),
    "up gateway",
    "Addresses of workers: HOST:PORT or unix:/path, comma-separated, or dns:NAME:PORT. "
    "For `loraplex up`, the number of workers.",
)
MAX_REQUEST_S: Setting[float] = Setting(
    "LORAPLEX_MAX_REQUEST_S",
    parse_some_seconds,
    600.0,
    "gateway",
    "Deadline of requests that set none, in seconds.",
)
LORA_ROOT = path_setting(
    "LORAPLEX_LORA_ROOT",
    "gateway",
    "Folder from which `/v1/load_lora_adapter` may publish; without it, the call is not served. "
    "With keys, a tenant may publish only from the subfolder that has its name.",
)

# Worker: the base and how it is computed
WORKER_LISTEN = listen_setting(
    "LORAPLEX_WORKER_LISTEN", "worker", "Address of the gRPC server.", "127.0.0.1:50053"
)
MODEL: Setting[str] = Setting(
    "LORAPLEX_MODEL",
    parse_model,
    "",
    "up worker",
    "Base model: a folder, GGUF file, hub id or s3:// address.",
)
SERVED_MODEL_NAME = text_setting(
    "LORAPLEX_SERVED_MODEL_NAME",
    "up worker",
    "Id of the base, by default the hub id or the folder's name.",
)
DEVICE = choice_setting(
    "LORAPLEX_DEVICE",
    "auto cpu cuda",
    "up worker",
    "Device to compute on; `auto` = a GPU if there is one.",
)
DTYPE = choice_setting(
    "LORAPLEX_DTYPE",
    "auto float32 bfloat16 float16",
    "up worker",
    "Arithmetic of the base; `auto` = bfloat16 on CUDA, and on CPUs with AMX, AVX-512 "
    "BF16 or Arm's BF16 for larger half-precision bases; otherwise float32.",
)
LORA_DTYPE = choice_setting(
    "LORAPLEX_LORA_DTYPE",
    "auto float32 bfloat16 float16 int8",
    "up worker",
    "Storage of LoRA weights; `auto` = as published or computed, `int8` = rounded, half the size.",
)
QUANTIZATION = choice_setting(
    "LORAPLEX_QUANTIZATION",
    "none int8 int4 fp8",
    "up worker",
    "Quantise the linears of a full-precision base when it is loaded.",
)
KV_CACHE_DTYPE = choice_setting(
    "LORAPLEX_KV_CACHE_DTYPE",
    "auto float32 bfloat16 float16 int8 fp8",
    "up worker",
    "Storage of keys and values: `int8`, `fp8` or the dtype of the base; `auto` = as config.json "
    "asks, otherwise that dtype.",
)
CPU_ISA = choice_setting(
    "LORAPLEX_CPU_ISA",
    "auto amx avx512_bf16 avx512 avx2 neon_bf16 neon torch",
    "worker",
    "Instruction set of CPU kernels; `auto` = the best one, `torch` = no compiled kernels.",
)
ATTENTION_BACKEND: Setting[str] = Setting(
    "LORAPLEX_ATTENTION_BACKEND",
    choice("auto", "vanilla", "cpu", "triton", "flashinfer", group=ATTENTION_GROUP),
    "auto",
    "up worker",
    "Kernels: `triton`, `flashinfer`, `cpu` (compiled), `vanilla` (torch), or a package's name.",
)
MODEL_IMPL = choice_setting(
    "LORAPLEX_MODEL_IMPL",
    "auto native transformers",
    "up worker",
    "Model code: `native`, or `transformers` for that library's; `auto` = native if there is any.",
)
TENSOR_PARALLEL: Setting[int] = Setting(
    "LORAPLEX_TENSOR_PARALLEL",
    integer(1),
    1,
    "up worker",
    "Number of processes that share a base; it must divide the attention heads.",
)
NNODES: Setting[int] = Setting(
    "LORAPLEX_NNODES",
    integer(1),
    1,
    "worker",
    "Number of machines that these processes are divided among. Needs a service token.",
)
NODE_RANK: Setting[int] = Setting(
    "LORAPLEX_NODE_RANK",
    integer(0),
    0,
    "worker",
    "Number of this machine; 0 = the one that serves, which all others follow.",
)
MASTER_ADDR = listen_setting(
    "LORAPLEX_MASTER_ADDR",
    "worker",
    "HOST:PORT at which the other machines reach the first, which listens there.",
)
FULLY_SHARDED_LORAS = flag_setting(
    "LORAPLEX_FULLY_SHARDED_LORAS",
    "up worker",
    "Divide both matrices of an adapter among tensor-parallel ranks at every linear.",
)

# Worker: memory
KV_MEMORY: Setting[Memory] = Setting(
    "LORAPLEX_KV_MEMORY",
    parse_memory,
    Memory(),
    "up worker",
    "Memory for KV cache and adapters: bytes, or a percentage of what the base leaves free; "
    "unset = a size that follows from the device.",
)
GPU_MEMORY_UTILIZATION: Setting[float | None] = Setting(
    "LORAPLEX_GPU_MEMORY_UTILIZATION",
    parse_share,
    None,
    "up worker",
    "Share of a GPU's memory for weights, activations, KV cache and adapters; unset = 0.9.",
)
LORA_MEMORY: Setting[Memory] = Setting(
    "LORAPLEX_LORA_MEMORY",
    parse_memory,
    Memory(),
    "up worker",
    "Largest part of LORAPLEX_KV_MEMORY for adapters: bytes, or a percentage of it; unset = all.",
)
MAX_LORA_RANK: Setting[int] = Setting(
    "LORAPLEX_MAX_LORA_RANK", integer(1, 4096), 256, "up worker", "Largest rank that is accepted."
)
CACHE_BYTES = bytes_setting(
    "LORAPLEX_CACHE_BYTES",
    "worker",
    "Largest size of the disk cache; unset = a quarter of the disk space that is free or that "
    "it uses.",
)
HOST_CACHE_BYTES = bytes_setting(
    "LORAPLEX_HOST_CACHE_BYTES",
    "worker",
    "Pinned host memory for adapters of each GPU; unset = a quarter of the memory for all GPUs.",
)

# Worker: what a step holds
MAX_NUM_SEQS: Setting[int] = Setting(
    "LORAPLEX_MAX_NUM_SEQS", integer(1), 256, "up worker", "Largest number of requests in one step."
)
MAX_MODEL_LEN = count_setting(
    "LORAPLEX_MAX_MODEL_LEN",
    "up worker",
    "Longest context in tokens, prompt and output together; unset = that of the base.",
)
MAX_NUM_BATCHED_TOKENS: Setting[int] = Setting(
    "LORAPLEX_MAX_NUM_BATCHED_TOKENS",
    integer(1),
    2048,
    "up worker",
    "Largest number of tokens in one step, for prompts and decoding requests together.",
)
MAX_LORAS = count_setting(
    "LORAPLEX_MAX_LORAS", "up worker", "Largest number of adapters in one step; unset = no limit."
)
CLUSTER_SIZE = count_setting(
    "LORAPLEX_CLUSTER_SIZE",
    "up worker",
    "Once this many adapters run, a tenant's requests for these go first, for at most 30 s; "
    "unset = never.",
)

ALL_SETTINGS = tuple(value for value in globals().values() if isinstance(value, Setting))
