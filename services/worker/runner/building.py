"""From the folder of a base to a runner: model, arena, and the operators that compute here."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loraplex.adapter_format.geometry import Geometry
from loraplex.cli.progress import ProgressBar
from loraplex.client.progress import Progress
from loraplex.errors import InvalidRequest, LoraplexError, Unsupported
from loraplex_services.worker.adapters.device.base_values import SiteValues
from loraplex_services.worker.adapters.device.loader import AdapterLoader
from loraplex_services.worker.adapters.device.pinned_cache import PinnedCache, default_bytes
from loraplex_services.worker.adapters.device.weights import AdapterWeights
from loraplex_services.worker.adapters.pack.contents import ModuleReader, base_geometry, weights_key
from loraplex_services.worker.adapters.pack.packing import Packer
from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.layers.ranks import OneRank, Ranks
from loraplex_services.worker.model.decoder import Decoder, SiteWeights
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.model.load import Checkpoint, DummyWeights, Weights, published
from loraplex_services.worker.ops.lora.records import Records
from loraplex_services.worker.runner.allocation import allocate, dtype_key, stored_dtype
from loraplex_services.worker.runner.backends import choose_operators, share_threads
from loraplex_services.worker.runner.memory import ArenaSize
from loraplex_services.worker.runner.numerics import (
    dtype_name,
    fingerprint,
    half_wins,
    resolve_device,
    resolve_dtype,
)
from loraplex_services.worker.runner.parallel.collectives import join
from loraplex_services.worker.runner.parallel.followers import Followers
from loraplex_services.worker.runner.parallel.messages import RankReady
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.step_batch import BatchMaker
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.own_rope import base_ropes
from loraplex_services.worker.types.runner_protocol import ModelInfo
from loraplex_services.worker.types.sharding import Shard, check_divisible

if TYPE_CHECKING:  # Triton is not everywhere
    from loraplex_services.worker.runner.gpu_path import GpuPath

logger = logging.getLogger(__name__)

RENDEZVOUS_TIMEOUT_S = 120.0
"""For all ranks to start and meet, before any of them loads."""
PARALLEL_FAMILIES = (
    "gemma2",
    "gemma3_text",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
"""Whose weights can be divided."""


def build_runner(
    model_dir: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    arena_bytes: int,
    arena_share: float = 0.0,
    gpu_memory_utilization: float = 0.0,
    max_lora_rank: int = 256,
    max_resident: int = 4096,
    max_model_len: int = 0,
    max_num_tokens: int = 2048,
    max_num_rows: int = 256,
    load_format: str = "auto",
    cpu_isa: str = "auto",
    attention_backend: str = "auto",
    overlap: str = "off",
    adapter_dtype: str = "auto",
    host_cache_bytes: int = 0,
    executors: tuple[Executor, Executor] | None = None,
    num_ranks: int = 1,
    fully_sharded_loras: bool = False,
    rendezvous_timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    on_rank_end: Callable[[int, int], None] = lambda rank, code: None,
) -> TorchRunner:
    """Load a base from a folder in Hugging Face layout and allocate its arena.

    Args:
        arena_bytes, arena_share, gpu_memory_utilization: of each rank; see `memory.ArenaSize`.
        max_lora_rank: adapters of a higher rank are refused at load.
        max_resident: adapters that may be loaded at once; slots are below it.
        max_model_len: longest context in tokens; 0 = that of the base.
        max_num_tokens, max_num_rows: the most positions and the most requests of one step.
        load_format: `auto` = safetensors; `dummy` = random weights of the config's shape.
        cpu_isa: instruction set of the CPU kernels (see `native/isa.py`); `torch` = none.
        adapter_dtype, host_cache_bytes: see `stored_dtype`, `_pinned_cache`.
        attention_backend, overlap, executors: see `choose_operators`, `StepOrder`, `AdapterLoader`.
        num_ranks: processes that share the base. The others are started here; `close` ends them.
        fully_sharded_loras: divide both matrices of an adapter's pairs, not one.
        on_rank_end: called from another thread when a rank ends, with its number and exit code.

    Raises: LoraplexError naming what is wrong; RankLost where a rank ended or came too late."""
    settings: dict[str, Any] = dict(
        device=device, dtype=dtype, load_format=load_format, cpu_isa=cpu_isa,
        arena_bytes=arena_bytes, arena_share=arena_share,
        gpu_memory_utilization=gpu_memory_utilization, max_lora_rank=max_lora_rank,
        max_resident=max_resident, max_model_len=max_model_len, max_num_tokens=max_num_tokens,
        max_num_rows=max_num_rows, attention_backend=attention_backend, overlap=overlap,
        adapter_dtype=adapter_dtype, host_cache_bytes=host_cache_bytes,
        fully_sharded_loras=fully_sharded_loras,
    )  # fmt: skip
    if num_ranks == 1:
        return _build(model_dir, OneRank(), executors, **settings)
    check_group(model_dir, resolve_device(device), num_ranks)
    followers = Followers(num_ranks, model_dir, settings, rendezvous_timeout_s, on_rank_end)
    return _lead(followers, model_dir, Shard(0, num_ranks), settings, executors)


def _lead(
    followers: Followers,
    model_dir: Path,
    shard: Shard,
    settings: Mapping[str, Any],
    executors: tuple[Executor, Executor] | None,
) -> TorchRunner:
    """Rank 0 of a group whose other ranks are starting."""
    meeting = followers.rendezvous, followers.timeout_s
    try:
        runner, ready = build_rank(model_dir, shard, *meeting, settings, executors)
        followers.await_ready(ready)
    except BaseException:
        followers.close()
        raise
    runner.lead(followers)
    return runner


def check_group(model_dir: Path, device: torch.device, num_ranks: int) -> None:
    """Refuse a base or a machine that so many ranks cannot share.

    Raises:
        LoraplexError: naming the field that is wrong.
    """
    _, config = read_model_config(model_dir)
    if config.model_type not in PARALLEL_FAMILIES:
        known = ", ".join(sorted(PARALLEL_FAMILIES))
        why = f"is served by one rank only; tensor parallelism knows {known}"
        raise Unsupported.field("config.json:model_type", config.model_type, why)
    check_divisible(config, num_ranks)
    if device.type == "cuda" and num_ranks > (num_devices := torch.cuda.device_count()):
        why = f"this machine has {num_devices} CUDA devices, and each rank needs its own"
        raise InvalidRequest.field("tensor_parallel", num_ranks, why)


def build_rank(
    model_dir: Path,
    shard: Shard,
    rendezvous: str,
    timeout_s: float,
    settings: Mapping[str, Any],
    executors: tuple[Executor, Executor] | None = None,
) -> tuple[TorchRunner, RankReady]:
    """Meet the other ranks and build this one's part. `settings` are those of `build_runner`.

    Raises: as `build_runner` does.
    """
    device = resolve_device(settings["device"])
    if device.type == "cuda":
        torch.cuda.set_device(shard.rank)
    ranks = join(shard, rendezvous, device, timeout_s)
    runner = _build(model_dir, ranks, executors, **settings)
    info = runner.model_info()
    ready = RankReady(
        torch_version=str(torch.__version__),
        release=_release(),
        base=runner.layout.base_key,
        dtype=info.dtype,
        arithmetic=info.numerics_fingerprint,
        num_blocks=runner.arena_blocks,
        block_bytes=runner.block_bytes,
    )
    return runner, ready


def _release() -> str:
    """Version of this package, where it is installed."""
    try:
        return metadata.version("loraplex")
    except metadata.PackageNotFoundError:
        return ""


def _build(
    model_dir: Path,
    ranks: Ranks,
    executors: tuple[Executor, Executor] | None,
    *,
    device: str,
    dtype: str,
    arena_bytes: int,
    arena_share: float,
    gpu_memory_utilization: float,
    max_lora_rank: int,
    max_resident: int,
    max_model_len: int,
    max_num_tokens: int,
    max_num_rows: int,
    load_format: str,
    cpu_isa: str,
    attention_backend: str,
    overlap: str,
    adapter_dtype: str,
    host_cache_bytes: int,
    fully_sharded_loras: bool,
) -> TorchRunner:
    """One rank's part of a base; see `build_runner`."""
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, _half_wins(model_dir, load_format, cpu_isa))
    operators = choose_operators(torch_device, torch_dtype, cpu_isa, attention_backend)
    operators.ranks, operators.fully_sharded = ranks, fully_sharded_loras
    logger.info("computing in %s with %s", dtype_name(torch_dtype), operators.name)
    config, model = _read_model(
        model_dir, load_format, torch_dtype, torch_device, operators, max_model_len
    )
    share_threads(model.weight_bytes, operators, torch_device)
    size = ArenaSize(arena_bytes, arena_share, gpu_memory_utilization)
    largest = max_num_tokens, max_num_rows
    kv = allocate(size, model, operators, torch_dtype, torch_device, largest)
    arena, sites = kv.arena, model.site_weights
    geometry = base_geometry(model_dir, config, sites.table)
    stored, base_key = stored_dtype(adapter_dtype, operators, kv), weights_key(model_dir, geometry)
    layout = _adapter_layout(model, kv, operators, max_lora_rank, base_key, stored)
    host = _pinned_cache(arena, host_cache_bytes)
    adapters = AdapterWeights(arena, max_resident, model.ropes, layout.ropes, host)
    loader = AdapterLoader(adapters, _packer(layout, geometry, sites, torch_device), executors)
    facts = config, layout, geometry, torch_device, torch_dtype, operators
    info = _model_info(*facts, max_model_len)
    limits = max_resident, max_lora_rank, max_num_tokens, max_num_rows
    batches = _batch_maker(model, operators, kv, adapters, layout, torch_device, limits)
    gc.freeze()  # what stays need not be walked by full collections: 4% of a step's time
    draws = operators.draws
    return TorchRunner(model, arena, kv, loader, layout, info, batches, draws, overlap, ranks)


def _adapter_layout(
    model: Decoder, kv: KvBuffer, operators: Operators, max_rank: int, base_key: str, stored: str
) -> AdapterLayout:
    """How adapters are packed for this base; `base_key` names its weights."""
    return AdapterLayout(
        block_bytes=kv.arena.block_bytes,
        dtype=dtype_key(kv.planes(0)[0].dtype),
        keeps_half=isinstance(operators, NativeOperators),
        max_rank=max_rank,
        base_key=base_key,
        sites=model.site_weights.table,
        ropes=base_ropes(model.config),
        stored=stored,
        shard=operators.ranks.shard,
        fully_sharded=operators.fully_sharded,
    )


def _pinned_cache(arena: ArenaBuffer, num_bytes: int) -> PinnedCache | None:
    """Packed images in pinned memory, on CUDA; 0 bytes = chosen here. On a CPU the page cache is as
    near."""
    return PinnedCache(arena, num_bytes or default_bytes()) if arena.data.is_cuda else None


def _half_wins(folder: Path, load_format: str, cpu_isa: str) -> bool:
    """See `numerics.half_wins`; a folder without readable weights is refused later, by name."""
    try:
        return load_format == "auto" and half_wins(*published(folder), cpu_isa)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, LoraplexError):
        return False


def _packer(
    layout: AdapterLayout, geometry: Geometry, sites: SiteWeights, device: torch.device
) -> Packer:
    """Reads adapters of this base and lays their bytes out."""
    reader = ModuleReader(geometry, sites.table, layout.max_rank)
    return Packer(reader, layout, SiteValues(sites, layout, device))


def _batch_maker(
    model: Decoder,
    operators: Operators,
    kv: KvBuffer,
    adapters: AdapterWeights,
    layout: AdapterLayout,
    device: torch.device,
    limits: tuple[int, int, int, int],
) -> BatchMaker:
    """`limits` = max_resident, max_lora_rank, max_num_tokens, max_num_rows."""
    is_native = isinstance(operators, NativeOperators)
    return BatchMaker(
        kv,
        model.ropes,
        adapters.table,
        device,
        max_num_tokens=limits[2],
        make_metadata=operators.make_metadata,
        records=Records(adapters.table, len(layout.sites.sites)) if is_native else None,
        gpu=_gpu_path(model, operators, kv, adapters, limits, layout.int8),
    )


def _gpu_path(
    model: Decoder,
    operators: Operators,
    kv: KvBuffer,
    adapters: AdapterWeights,
    limits: tuple[int, int, int, int],
    is_int8: bool,
) -> GpuPath | None:
    """Tables, workspace and captured graphs where Triton computes, else None."""
    if operators.name != "triton":
        return None
    from loraplex_services.worker.runner.gpu_path import GpuLimits, GpuPath

    return GpuPath(model, operators, kv, adapters.table, GpuLimits(*limits), is_int8)


def _read_model(
    folder: Path,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    operators: Operators,
    max_model_len: int = 0,
) -> tuple[ModelConfig, Decoder]:
    """The base with its weights; a terminal shows how far they are read.

    Raises:
        InvalidRequest: `max_model_len` is longer than the context of the base.
    """
    family, config = read_model_config(folder)
    if max_model_len > (own := config.max_position_embeddings):
        why = f"must be at most the context of the base, which is {own} tokens"
        raise InvalidRequest.field("max_model_len", max_model_len, why)
    with ProgressBar(folder.name) as bar:
        weights = _weights(load_format, folder, dtype, device, bar)
        return config, family.build(config, weights, operators)


def _weights(
    load_format: str, folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Weights:
    if load_format == "dummy":
        return DummyWeights(dtype, device)
    if load_format != "auto":
        raise InvalidRequest.field("load_format", load_format, "must be auto or dummy")
    return Checkpoint(folder, dtype, device, progress)


def _model_info(
    config: ModelConfig,
    layout: AdapterLayout,
    geometry: Geometry,
    device: torch.device,
    dtype: torch.dtype,
    operators: Operators,
    max_model_len: int,
) -> ModelInfo:
    arithmetic = operators.name + (f"-{layout.stored}" if layout.stored != "auto" else "")
    num_ranks = layout.shard.size
    if num_ranks > 1:  # sums have another order
        arithmetic += f"-tp{num_ranks}" + "-full" * layout.fully_sharded
    return ModelInfo(
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or config.max_position_embeddings,
        caps_context=max_model_len > 0,
        eos_token_ids=config.eos_token_ids,
        dtype=dtype_name(dtype),
        device=device.type,
        kernels=operators.name.removeprefix("native-"),
        numerics_fingerprint=fingerprint(geometry.fingerprint, device, dtype, arithmetic),
        geometry=geometry,
        rope_switch_len=config.rope_switch_len,
    )
