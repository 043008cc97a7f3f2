"""Every LORAPLEX_* variable, once: name, type, default, readers and meaning.

A service reads its settings in its `config.py` and touches the environment nowhere else. No name
ends in _PORT or _HOST: Kubernetes injects such names. docs/reference/settings.md is made of it.
"""

from __future__ import annotations

from pathlib import Path

from loraplex.units import parse_bytes, parse_seconds
from loraplex_services.common.knob import (
    DEBUG_LIST,
    Knob,
    Switch,
    choice_knob,
    listen_knob,
    path_knob,
    text_knob,
)
from loraplex_services.common.units import (
    ATTENTION_GROUP,
    Memory,
    choice,
    parse_bool,
    parse_list,
    parse_memory,
    parse_share,
    parse_store_url,
    parse_text,
    whole,
)

# Addresses and credentials of clients
REGISTRY_ADDRESS = text_knob(
    "LORAPLEX_REGISTRY_ADDRESS", "tools gateway", "Registry to talk to.", "127.0.0.1:50052"
)
GATEWAY_ADDRESS = text_knob(
    "LORAPLEX_GATEWAY_ADDRESS", "tools", "Gateway (gRPC) to talk to.", "127.0.0.1:50051"
)
API_KEY: Knob[str] = Knob(
    "LORAPLEX_API_KEY", parse_text, "", "tools", "Key sent with every call.", secret=True
)
CA = path_knob("LORAPLEX_CA", "tools all", "PEM file of the CA that peers are checked against.")
CERT = path_knob("LORAPLEX_CERT", "tools all", "PEM certificate shown to peers.")
KEY = path_knob("LORAPLEX_KEY", "tools all", "PEM private key of the certificate.")

# Every server
STATE_DIR = path_knob(
    "LORAPLEX_STATE_DIR",
    "up registry worker",
    "Where state lives; default ${XDG_STATE_HOME:-~/.local/state}/loraplex. For a worker, where "
    "its disk cache lives; default a temporary folder, removed when the worker ends.",
)
METRICS_LISTEN = listen_knob(
    "LORAPLEX_METRICS_LISTEN",
    "up all",
    "Also serve /metrics, /healthz and /readyz here; `loraplex up`: one port for each child.",
)
LOG_LEVEL: Knob[str] = Knob(
    "LORAPLEX_LOG_LEVEL",
    choice("debug", "info", "warning", "error"),
    "info",
    "up all",
    "Least severe level that is logged.",
)
DRAIN_S: Knob[float] = Knob(
    "LORAPLEX_DRAIN_S", parse_seconds, 20.0, "up all", "Longest drain after SIGTERM."
)
DEBUG: Knob[tuple[str, ...]] = Knob(
    DEBUG_LIST,
    parse_list,
    (),
    "up all",
    "Comma-separated switches for developers, NAME or NAME=VALUE; listed below.",
)

# Who may call
AUTH = choice_knob(
    "LORAPLEX_AUTH",
    "off keys",
    "up registry gateway worker",
    "keys = callers need an API key.",
)
ADMIN_KEY_FILE = path_knob(
    "LORAPLEX_ADMIN_KEY_FILE", "registry", "File with the first admin key, lpx_<id>_<secret>."
)
INSECURE: Knob[bool] = Knob(
    "LORAPLEX_INSECURE", parse_bool, False, "up all", "Allow a bind beyond loopback without auth."
)
ALLOWED_HOSTS: Knob[tuple[str, ...]] = Knob(
    "LORAPLEX_ALLOWED_HOSTS",
    parse_list,
    (),
    "gateway",
    "Host headers accepted besides loopback when there is no auth.",
)
SERVICE_TOKEN_FILE = path_knob(
    "LORAPLEX_SERVICE_TOKEN_FILE", "all", "Secret that services show to each other."
)
SERVICE_NAMES: Knob[tuple[str, ...]] = Knob(
    "LORAPLEX_SERVICE_NAMES",
    parse_list,
    (),
    "registry worker",
    "Names in the certificates of services; unset = any certificate signed by LORAPLEX_CA.",
)
HTTP_CERT = path_knob(
    "LORAPLEX_HTTP_CERT",
    "up gateway",
    "PEM certificate chain of the HTTP server; unset = plain HTTP.",
)
HTTP_KEY = path_knob("LORAPLEX_HTTP_KEY", "up gateway", "PEM private key of that certificate.")

# Registry: where adapters are stored
REGISTRY_LISTEN = listen_knob(
    "LORAPLEX_REGISTRY_LISTEN", "up registry", "Address of the gRPC server.", "127.0.0.1:50052"
)
REGISTRY_SERVICE_LISTEN = listen_knob(
    "LORAPLEX_REGISTRY_SERVICE_LISTEN",
    "registry",
    "gRPC address for services, which must show a certificate signed by LORAPLEX_CA.",
)
OBJECTS: Knob[str] = Knob(
    "LORAPLEX_OBJECTS",
    parse_store_url,
    "",
    "registry worker",
    "Object store: file:///path or s3://bucket/prefix.",
)
METADATA = text_knob(
    "LORAPLEX_METADATA",
    "registry gateway",
    "Redis: redis://, rediss://, redis+sentinel://, or embedded for a private server.",
    "embedded",
)

# Gateway: which requests are accepted
GATEWAY_LISTEN = listen_knob(
    "LORAPLEX_GATEWAY_LISTEN", "up gateway", "Address of the gRPC server.", "127.0.0.1:50051"
)
HTTP_LISTEN = listen_knob(
    "LORAPLEX_HTTP_LISTEN", "up gateway", "Address of the HTTP server.", "127.0.0.1:8080"
)
WORKERS: Knob[tuple[str, ...]] = Knob(
    "LORAPLEX_WORKERS",
    parse_list,
    (),
    "up gateway",
    "Workers: HOST:PORT or unix:/path, comma-separated, or dns:NAME:PORT; `loraplex up`: how many.",
)
MAX_REQUEST_S: Knob[float] = Knob(
    "LORAPLEX_MAX_REQUEST_S",
    parse_seconds,
    600.0,
    "gateway",
    "Deadline of requests that name none.",
)
TOOL_CALL_PARSER = choice_knob(
    "LORAPLEX_TOOL_CALL_PARSER",
    "auto hermes llama3_json mistral qwen3_coder phi4_mini_json pythonic glm harmony none",
    "gateway",
    "How the bases write tool calls; auto = what the chat template shows.",
)
REASONING_PARSER: Knob[str] = Knob(
    "LORAPLEX_REASONING_PARSER",
    choice("auto", "think", "none"),
    "auto",
    "gateway",
    "Split `<think>` off into reasoning; auto = where the chat template knows it.",
)
LORA_ROOT = path_knob(
    "LORAPLEX_LORA_ROOT",
    "gateway",
    "Folder that `/v1/load_lora_adapter` may publish from; unset = the call is not served.",
)

# Worker: the base and how it is computed
WORKER_LISTEN = listen_knob(
    "LORAPLEX_WORKER_LISTEN", "worker", "Address of the gRPC server.", "127.0.0.1:50053"
)
MODEL = text_knob("LORAPLEX_MODEL", "up worker", "Base model: folder, hub id or s3:// address.")
SERVED_MODEL_NAME = text_knob(
    "LORAPLEX_SERVED_MODEL_NAME", "up worker", "Id of the base; default: hub id or folder name."
)
DEVICE: Knob[str] = Knob(
    "LORAPLEX_DEVICE", choice("auto", "cpu", "cuda"), "auto", "up worker", "Where to compute."
)
DTYPE = choice_knob(
    "LORAPLEX_DTYPE",
    "auto float32 bfloat16 float16",
    "up worker",
    "Arithmetic of the base; auto = bfloat16 on CUDA, and on CPUs with AMX or AVX-512 BF16 for "
    "larger half-precision bases; else float32.",
)
LORA_DTYPE = choice_knob(
    "LORAPLEX_LORA_DTYPE",
    "auto float32 bfloat16 float16 int8",
    "up worker",
    "Storage of LoRA weights; auto = as published or computed, int8 = half the bytes, rounded.",
)
QUANTIZATION: Knob[str] = Knob(
    "LORAPLEX_QUANTIZATION",
    choice("none", "int8", "int4", not_yet=["fp8"]),
    "none",
    "up worker",
    "Quantises the linears of a full-precision base when it is loaded; CPUs only.",
)
KV_CACHE_DTYPE = choice_knob(
    "LORAPLEX_KV_CACHE_DTYPE",
    "auto int8",
    "up worker",
    "Storage of keys and values; auto = as computed, int8 = about half the bytes; CPUs only.",
)
CPU_ISA = choice_knob(
    "LORAPLEX_CPU_ISA",
    "auto amx avx512_bf16 avx512 avx2 generic torch",
    "worker",
    "Instruction set of the CPU kernels; auto = the best one here, torch = no compiled kernels.",
)
ATTENTION_BACKEND: Knob[str] = Knob(
    "LORAPLEX_ATTENTION_BACKEND",
    choice("auto", "vanilla", "cpu", "triton", not_yet=["flashinfer"], group=ATTENTION_GROUP),
    "auto",
    "up worker",
    "Kernels of attention and LoRA: triton, cpu (compiled), vanilla (plain torch), or a package's.",
)
MODEL_IMPL = choice_knob(
    "LORAPLEX_MODEL_IMPL",
    "auto native transformers",
    "up worker",
    "native = our model code, transformers = that library's, auto = the latter where we have none.",
)
TENSOR_PARALLEL: Knob[int] = Knob(
    "LORAPLEX_TENSOR_PARALLEL",
    whole(1),
    1,
    "up worker",
    "Ranks of one machine that divide a base; must divide its heads.",
)
FULLY_SHARDED_LORAS: Knob[bool] = Knob(
    "LORAPLEX_FULLY_SHARDED_LORAS",
    parse_bool,
    False,
    "up worker",
    "Tensor-parallel ranks divide both matrices of an adapter, which saves memory.",
)

# Worker: memory
KV_MEMORY: Knob[Memory] = Knob(
    "LORAPLEX_KV_MEMORY",
    parse_memory,
    Memory(),
    "up worker",
    "Arena (KV cache and adapters): bytes, or percent of what the base leaves free; 0 = chosen.",
)
GPU_MEMORY_UTILIZATION: Knob[float] = Knob(
    "LORAPLEX_GPU_MEMORY_UTILIZATION",
    parse_share,
    0.0,
    "up worker",
    "Share of a GPU's memory for weights, steps and arena; unset = 0.9.",
)
MAX_LORA_RANK: Knob[int] = Knob(
    "LORAPLEX_MAX_LORA_RANK", whole(1, 4096), 256, "up worker", "Largest rank accepted."
)
HOST_CACHE_BYTES: Knob[int] = Knob(
    "LORAPLEX_HOST_CACHE_BYTES",
    parse_bytes,
    0,
    "worker",
    "On CUDA: pinned host memory for packed adapters; 0 = an eighth of the host's, at most 4 GiB.",
)
CACHE_BYTES: Knob[int] = Knob(
    "LORAPLEX_CACHE_BYTES",
    parse_bytes,
    16 << 30,
    "worker",
    "Most bytes that the disk cache of verified adapters takes.",
)

# Worker: what a step holds
MAX_NUM_SEQS: Knob[int] = Knob(
    "LORAPLEX_MAX_NUM_SEQS", whole(1), 256, "up worker", "Largest number of requests in one step."
)
MAX_MODEL_LEN: Knob[int] = Knob(
    "LORAPLEX_MAX_MODEL_LEN",
    whole(),
    0,
    "up worker",
    "Longest context in tokens, prompt and output together; 0 = the base's.",
)
MAX_NUM_BATCHED_TOKENS: Knob[int] = Knob(
    "LORAPLEX_MAX_NUM_BATCHED_TOKENS",
    whole(1),
    2048,
    "up worker",
    "Token budget of one step, shared by prompts and by requests that decode.",
)
MAX_LORAS: Knob[int] = Knob(
    "LORAPLEX_MAX_LORAS", whole(), 0, "up worker", "Distinct adapters in one step; 0 = no limit."
)
MAX_STEP_S: Knob[float] = Knob(
    "LORAPLEX_MAX_STEP_S",
    parse_seconds,
    0.2,
    "worker",
    "Target time of a step in which requests decode; prompts are cut to meet it. 0 = no target.",
)
POLICY = choice_knob(
    "LORAPLEX_POLICY",
    "fair fcfs",
    "worker",
    "Order of waiting requests: fair to tenants and adapters, or by arrival.",
)
_PREFERS = "Number of running adapters from which a tenant's requests for them go first; 0 = never."
CLUSTER_SIZE: Knob[int] = Knob("LORAPLEX_CLUSTER_SIZE", whole(), 0, "up worker", _PREFERS)

# Switches of LORAPLEX_DEBUG
LOG_FORMAT: Switch[str] = Switch(
    "log-format",
    choice("auto", "json", "text"),
    "auto",
    "up all",
    "auto = text on a terminal, JSON lines elsewhere.",
)
LOAD_FORMAT: Switch[str] = Switch(
    "load-format",
    choice("auto", "dummy"),
    "auto",
    "worker",
    "dummy = random weights of the model's config, for benchmarks.",
)
OVERLAP: Switch[str] = Switch(
    "overlap",
    choice("auto", "on", "off"),
    "auto",
    "worker",
    "Plan a step while the previous one runs; auto = on GPUs.",
)
PREFIX_CACHE: Switch[bool] = Switch(
    "prefix-cache",
    parse_bool,
    True,
    "worker",
    "Keep the KV cache of finished requests for prompts with the same beginning.",
)
_MEANS = "Compute likely tokens ahead and verify them; on CPUs, where it pays. No output changes."
SPECULATION: Switch[bool] = Switch("speculation", parse_bool, True, "worker", _MEANS)
STEP_TIMEOUT_S: Switch[float] = Switch(
    "step-timeout-s",
    parse_seconds,
    120.0,
    "worker",
    "An engine process that reports nothing for longer is restarted.",
)
STEP_TRACE: Switch[Path | None] = Switch(
    "step-trace", Path, None, "worker", "File that gets one line per step, to fit a simulation."
)
GC_INTERVAL_S: Switch[float] = Switch(
    "gc-interval-s",
    parse_seconds,
    86_400.0,
    "registry",
    "How often unreferenced bytes are collected; 0 = only by `registry gc`.",
)
FAILPOINT = Switch(
    "failpoint",
    parse_text,
    "",
    "registry",
    "Step at which the process dies, STEP or STEP:COUNT. For tests.",
)
REPLACE_BASES: Switch[bool] = Switch(
    "replace-bases",
    parse_bool,
    False,
    "gateway",
    "A served base replaces a registered one with the same id and another geometry. "
    "`loraplex up` sets it for a state folder of its own.",
)

SECTIONS = {
    REGISTRY_ADDRESS.name: "Addresses and credentials of clients",
    STATE_DIR.name: "Every server",
    AUTH.name: "Who may call",
    REGISTRY_LISTEN.name: "Registry: where adapters are stored",
    GATEWAY_LISTEN.name: "Gateway: which requests are accepted",
    WORKER_LISTEN.name: "Worker: the base and how it is computed",
    KV_MEMORY.name: "Worker: memory",
    MAX_NUM_SEQS.name: "Worker: what a step holds",
}
"""Headings of docs/reference/settings.md, by the variable that each begins with."""

_VALUES = tuple(globals().values())
ALL_KNOBS = tuple(value for value in _VALUES if isinstance(value, Knob))
ALL_SWITCHES = tuple(value for value in _VALUES if isinstance(value, Switch))
