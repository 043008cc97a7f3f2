"""From the folder of a base to a runner: model, arena, and the operators that compute here."""

from __future__ import annotations

import gc
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from loraplex.adapter_format.geometry import Geometry
from loraplex.cli.progress import ProgressBar
from loraplex.client.progress import Progress
from loraplex.errors import InvalidRequest, LoraplexError, Unsupported
from loraplex_services.worker.adapters.device.base_values import TORCH_DTYPES, SiteValues
from loraplex_services.worker.adapters.device.loader import AdapterLoader
from loraplex_services.worker.adapters.device.pinned_cache import PinnedCache, default_bytes
from loraplex_services.worker.adapters.device.weights import AdapterWeights
from loraplex_services.worker.adapters.pack.contents import ModuleReader, base_geometry, weights_key
from loraplex_services.worker.adapters.pack.packing import Packer
from loraplex_services.worker.arena_buffer import ArenaBuffer, KvBuffer, blocks_for
from loraplex_services.worker.cache.kv_layout import MAX_BLOCK_BYTES, plan_kv_groups
from loraplex_services.worker.layers.native_operators import NativeOperators
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.decoder import Decoder, SiteWeights
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.model.load import Checkpoint, DummyWeights, Weights, published
from loraplex_services.worker.ops.lora.records import Records
from loraplex_services.worker.runner.backends import choose_operators, share_threads
from loraplex_services.worker.runner.memory import ArenaSize, memory_of
from loraplex_services.worker.runner.numerics import (
    dtype_name,
    fingerprint,
    half_wins,
    resolve_device,
    resolve_dtype,
)
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.runner.step_batch import BatchMaker
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.own_rope import base_ropes
from loraplex_services.worker.types.runner_protocol import ModelInfo

PROFILING_BYTES = 4 * MAX_BLOCK_BYTES
"""Of the arena that the step runs with whose memory is measured."""
_LORA_DTYPES = {
    "auto": "auto",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int8": "I8",
}

if TYPE_CHECKING:  # Triton is not everywhere
    from loraplex_services.worker.runner.gpu_path import GpuPath


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
) -> TorchRunner:
    """Load a base and allocate its arena.

    Args:
        model_dir: folder in Hugging Face layout.
        arena_bytes, arena_share, gpu_memory_utilization: see `memory.ArenaSize`.
        max_lora_rank: adapters of a higher rank are refused at load.
        max_resident: adapters that may be loaded at once; slots are below it.
        max_model_len: longest context in tokens; 0 = that of the base.
        max_num_tokens, max_num_rows: the most positions and the most requests of one step.
        load_format: `auto` = safetensors; `dummy` = random weights of the config's shape.
        cpu_isa: instruction set of the CPU kernels (see `native/isa.py`); `torch` = none.
        adapter_dtype, host_cache_bytes: see `_stored_dtype`, `_pinned_cache`.
        attention_backend, overlap, executors: see `choose_operators`, `StepOrder`, `AdapterLoader`.

    Raises: LoraplexError naming the file, field or setting that is wrong.
    """
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, _half_wins(model_dir, load_format, cpu_isa))
    operators = choose_operators(torch_device, torch_dtype, cpu_isa, attention_backend)
    config, model = _read_model(
        model_dir, load_format, torch_dtype, torch_device, operators, max_model_len
    )
    share_threads(model.weight_bytes, operators, torch_device)
    size = ArenaSize(arena_bytes, arena_share, gpu_memory_utilization)
    largest = max_num_tokens, max_num_rows
    kv = _allocated(size, model, operators, torch_dtype, torch_device, largest)
    arena, sites = kv.arena, model.site_weights
    geometry = base_geometry(model_dir, config, sites.table)
    stored, base_key = _stored_dtype(adapter_dtype, operators, kv), weights_key(model_dir, geometry)
    layout = _adapter_layout(model, kv, operators, max_lora_rank, base_key, stored)
    host = _pinned_cache(arena, host_cache_bytes)
    adapters = AdapterWeights(arena, max_resident, model.ropes, layout.ropes, host)
    loader = AdapterLoader(adapters, _packer(layout, geometry, sites, torch_device), executors)
    facts = config, layout, geometry, torch_device, torch_dtype, operators
    info = _model_info(*facts, max_model_len)
    limits = max_resident, max_lora_rank, max_num_tokens, max_num_rows
    batches = _batch_maker(model, operators, kv, adapters, layout, torch_device, limits)
    gc.freeze()  # what stays need not be walked by full collections: 4% of a step's time
    return TorchRunner(model, arena, kv, loader, layout, info, batches, operators.draws, overlap)


def _adapter_layout(
    model: Decoder, kv: KvBuffer, operators: Operators, max_rank: int, base_key: str, stored: str
) -> AdapterLayout:
    """How adapters are packed for this base; `base_key` names its weights."""
    return AdapterLayout(
        block_bytes=kv.arena.block_bytes,
        dtype=_dtype_key(kv.planes(0)[0].dtype),
        keeps_half=isinstance(operators, NativeOperators),
        max_rank=max_rank,
        base_key=base_key,
        sites=model.site_weights.table,
        ropes=base_ropes(model.config),
        stored=stored,
    )


def _stored_dtype(name: str, operators: Operators, kv: KvBuffer) -> str:
    """What A and B are kept as: a float type; `int8` = integers with a factor for each rank row;
    `auto` = as computed with, or published where the kernels read that.

    Raises:
        Unsupported: the kernels read adapters in the model's own dtype only.
    """
    stored = _LORA_DTYPES.get(name)
    if stored is None:
        known = ", ".join(_LORA_DTYPES)
        raise InvalidRequest.field("lora_dtype", name, f"must be one of {known}")
    model_dtype = _dtype_key(kv.planes(0)[0].dtype)
    if operators.name == "triton" and stored not in ("auto", "I8", model_dtype):
        dtype = dtype_name(TORCH_DTYPES[model_dtype])
        why = f"these kernels read adapters in the model's {dtype} or as int8; use auto, or --dtype"
        raise Unsupported.field("lora_dtype", name, why)
    return stored


def _kv_buffer(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_bytes: int
) -> KvBuffer:
    """The arena, and the KV cache in it."""
    groups = plan_kv_groups(config.windows, config.num_kv_heads, config.head_dim, dtype.itemsize)
    num_blocks = blocks_for(num_bytes, groups.block_bytes)
    return KvBuffer(ArenaBuffer(num_blocks, groups.block_bytes, device), groups, dtype)


def _allocated(
    size: ArenaSize,
    model: Decoder,
    operators: Operators,
    dtype: torch.dtype,
    device: torch.device,
    largest: tuple[int, int],
) -> KvBuffer:
    """The arena, beside weights that are loaded and what the largest step needs; `largest` = its
    tokens and rows."""
    is_gpu = device.type == "cuda"
    new_kv = partial(_kv_buffer, model.config, dtype, device)

    def step_bytes() -> int:
        if not is_gpu or operators.name != "triton":
            return 0
        from loraplex_services.worker.runner.profiling import measured_step_bytes

        return measured_step_bytes(model, operators, new_kv(PROFILING_BYTES), *largest)

    return new_kv(size.choose(memory_of(device), step_bytes, is_gpu=is_gpu))


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


def _dtype_key(dtype: torch.dtype) -> str:
    """Its safetensors name."""
    return next(name for name, known in TORCH_DTYPES.items() if known is dtype)


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
    return ModelInfo(
        vocab_size=config.vocab_size,
        max_model_len=max_model_len or config.max_position_embeddings,
        caps_context=max_model_len > 0,
        eos_token_ids=config.eos_token_ids,
        dtype=dtype_name(dtype),
        device=device.type,
        numerics_fingerprint=fingerprint(geometry.fingerprint, device, dtype, arithmetic),
        geometry=geometry,
        rope_switch_len=config.rope_switch_len,
    )
