"""What a group of ranks cannot share is refused before any of them starts."""

from __future__ import annotations

from pathlib import Path

import torch

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.types.sharding import check_divisible

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


def check_group(model_dir: Path, model_impl: str, device: torch.device, num_ranks: int) -> None:
    """Refuse a base or a machine that so many ranks cannot share.

    Raises:
        LoraplexError: naming the field that is wrong.
    """
    if model_impl == "transformers":
        why = "serves a base on one rank only; leave out --tensor-parallel"
        raise Unsupported.field("model_impl", model_impl, why)
    _, config = read_model_config(model_dir)
    if config.model_type not in PARALLEL_FAMILIES:
        known = ", ".join(sorted(PARALLEL_FAMILIES))
        why = f"is served by one rank only; tensor parallelism knows {known}"
        raise Unsupported.field("config.json:model_type", config.model_type, why)
    check_divisible(config, num_ranks)
    if device.type == "cuda" and num_ranks > (num_devices := torch.cuda.device_count()):
        why = f"this machine has {num_devices} CUDA devices, and each rank needs its own"
        raise InvalidRequest.field("tensor_parallel", num_ranks, why)
