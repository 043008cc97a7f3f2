"""Qwen 2 and 2.5: Llama with biases on q, k and v; upper layers may have a sliding window."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.plain import (
    FULL,
    SLIDING,
    Defaults,
    read_layer_types,
    read_plain,
    windows_of,
)
from loraplex_services.worker.types.model_config import ModelConfig


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json."""
    defaults = Defaults(max_position_embeddings=32768)
    config = read_plain(reader, "qwen2", eos_token_ids, defaults)
    return replace(config, qkv_bias=True, windows=read_windows(reader, config.num_layers))


def read_windows(reader: ModelConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows on layers from `max_window_layers` on, where `use_sliding_window` says so."""
    first = int(reader.get("max_window_layers", 28))
    window = reader.get("sliding_window", 4096)
    is_sliding = reader.flag("use_sliding_window", False)
    default = [SLIDING if is_sliding and layer >= first else FULL for layer in range(num_layers)]
    types = read_layer_types(reader, num_layers, default)
    if not is_sliding and SLIDING in types:
        raise reader.refuse("layer_types", SLIDING, "contradicts use_sliding_window: false")
    return windows_of(types, window)
