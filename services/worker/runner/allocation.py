"""Allocates the arena's memory, and decides in which dtype adapters are stored."""

from __future__ import annotations

from functools import partial

import torch

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.adapters.device.base_values import TORCH_DTYPES
from loraplex_services.worker.arena_buffer import SCALE_DTYPE, ArenaBuffer, KvBuffer, blocks_for
from loraplex_services.worker.cache.kv_layout import MAX_BLOCK_BYTES, plan_kv_groups
from loraplex_services.worker.cache.state_layout import state_layout
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.layers.ranks import Ranks
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.attention.backend import AUTO
from loraplex_services.worker.ops.attention.kv_codes import KV_CODES
from loraplex_services.worker.runner.memory import ArenaSize, memory_of
from loraplex_services.worker.runner.numerics import dtype_name
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.sharding import local_config

PROFILING_BYTES = 4 * MAX_BLOCK_BYTES
"""Size of the arena in bytes while the memory of the largest step is measured."""
_LORA_DTYPES = {
    "auto": "auto",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int8": "I8",
}


def allocate(
    size: ArenaSize,
    model: Decoder,
    operators: Operators,
    dtype: torch.dtype,
    device: torch.device,
    largest: tuple[int, int],
) -> KvBuffer:
    """Allocate the arena in the memory that the loaded weights and the largest step leave;
    `largest` = the tokens and rows of that step."""
    is_gpu, ranks = device.type == "cuda", operators.ranks
    kept = operators.attention_maker.kv_cache_dtype
    own = local_config(model.cached_config, ranks.shard)
    new_kv = partial(kv_buffer, own, dtype, device, kept=kept)

    def step_bytes() -> int:
        if not is_gpu or operators.name != "triton":
            return 0
        from loraplex_services.worker.runner.profiling import measured_step_bytes

        return measured_step_bytes(model, operators, new_kv(PROFILING_BYTES), *largest)

    num_bytes = size.choose(memory_of(device), step_bytes, is_gpu=is_gpu)
    if not (is_gpu or size.num_bytes):  # ranks share the host's memory
        num_bytes //= ranks.num_local
    return new_kv(_least(num_bytes, ranks, device))


def _least(num_bytes: int, ranks: Ranks, device: torch.device) -> int:
    """The smallest of the ranks' values: block ids mean the same on each of them."""
    if ranks.shard.size == 1:
        return num_bytes
    return int(ranks.all_gather(torch.tensor([num_bytes], device=device)).min())


def kv_buffer(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_bytes: int,
    *,
    kept: str = AUTO,
) -> KvBuffer:
    """The arena, and the KV cache in it, in a model's dtype or in codes."""
    codes = KV_CODES.get(kept)
    itemsize, scale_bytes = (codes.itemsize, SCALE_DTYPE.itemsize) if codes else (dtype.itemsize, 0)
    groups = plan_kv_groups(
        config.windows, config.kv_heads, itemsize, config.layers_without_kv, scale_bytes
    )
    num_blocks = blocks_for(num_bytes, groups.block_bytes)
    arena = ArenaBuffer(num_blocks, groups.block_bytes, device)
    return KvBuffer(arena, groups, dtype, codes, state_layout(config, groups.block_bytes))


def stored_dtype(name: str, operators: Operators, kv: KvBuffer) -> str:
    """The type in which A and B are kept: a float type; `int8` = integers with a factor for each
    rank row; `auto` = as computed with, or published if the kernels can read it.

    Raises:
        Unsupported: the kernels read adapters in the model's own dtype only.
    """
    stored = _LORA_DTYPES.get(name)
    if stored is None:
        known = ", ".join(_LORA_DTYPES)
        raise InvalidRequest.field("lora_dtype", name, f"must be one of {known}")
    model_dtype = dtype_key(kv.dtype)
    if operators.name == "triton" and stored not in ("auto", "I8", model_dtype):
        dtype = dtype_name(TORCH_DTYPES[model_dtype])
        why = f"these kernels read adapters in the model's {dtype} or as int8; use auto, or --dtype"
        raise Unsupported.field("lora_dtype", name, why)
    return stored


def dtype_key(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype."""
    return next(name for name, known in TORCH_DTYPES.items() if known is dtype)
