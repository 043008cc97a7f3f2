"""The parameters of a runner, which are the same on every rank."""

from __future__ import annotations

from typing import Any

import msgspec


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a base is computed, and the limits of its runner."""

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    """`auto` = safetensors; `dummy` = random weights of the config's shape."""
    model_impl: str = "auto"
    """`native` = a family of `model.families`; `transformers` = the library's class; `auto` = the
    latter if there is no family."""
    cpu_isa: str = "auto"
    """Instruction set of the CPU kernels (see `native/isa.py`); `torch` = none."""
    attention_backend: str = "auto"
    """See `choose_operators`."""
    arena_bytes: int
    """Bytes for KV cache and adapters together, on each rank; 0 = set by the next two fields (see
    `runner.memory.ArenaSize`)."""
    arena_share: float = 0.0
    gpu_memory_utilization: float = 0.0
    host_cache_bytes: int = 0
    """Pinned host memory for adapters of a rank on a GPU; 0 = see
    `runner.memory.default_host_cache_bytes`."""
    max_lora_rank: int = 256
    """Adapters of a higher rank are refused at load."""
    max_resident: int = 4096
    """Number of adapters that may be loaded at once; slots are below it."""
    max_model_len: int = 0
    """Longest context in tokens; 0 = that of the base."""
    max_num_batched_tokens: int = 2048
    """Most positions of one step."""
    max_num_seqs: int = 256
    """Most requests of one step."""
    overlap: str = "off"
    """`auto`, `on` or `off`: see `StepOrder`."""
    drafts: bool = True
    """Whether a step may verify drafts, where that changes no output."""
    lora_dtype: str = "auto"
    """How A and B are stored: `int8` = as integers with a factor for each rank row; a
    floating-point type; or `auto` (see `runner.allocation.stored_dtype`)."""
    quantization: str = "none"
    """Scheme by which linears of a full-precision base are quantised when it is loaded: see
    `model.on_load`."""
    kv_cache_dtype: str = "auto"
    """How keys and values are stored: `int8`, `fp8`, the name of the model's dtype, or `auto` = in
    the type that the base's config.json asks for, else in the model's dtype."""
    fully_sharded_loras: bool = False
    """Whether both matrices of an adapter's pairs are divided among the ranks at every linear,
    instead of where this is cheaper."""

    def runner_fields(self) -> dict[str, Any]:
        """The fields of this class and not those of subclasses, by name."""
        return {name: getattr(self, name) for name in RunnerSettings.__struct_fields__}
