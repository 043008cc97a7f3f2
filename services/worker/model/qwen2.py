"""Qwen 2 and 2.5: Llama with biases on q, k and v; upper layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Callable
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

DEFAULTS = Defaults(num_kv_heads=32, max_position_embeddings=32768)


def read_config(
    reader: ModelConfigReader, eos_token_ids: tuple[int, ...], defaults: Defaults = DEFAULTS
) -> ModelConfig:
    """Translate config.json."""
    config = read_plain(reader, "qwen2", eos_token_ids, defaults)
    return replace(config, qkv_bias=True, windows=read_windows(reader, config.num_layers))


def read_windows(
    reader: ModelConfigReader,
    num_layers: int,
    slides: Callable[[int, int], bool] = lambda layer, first: layer >= first,
) -> tuple[int | None, ...]:
    """The window of each layer, if `use_sliding_window` is true.

    Args:
        slides: whether a layer has the window if the file has no `layer_types`, given its index and
            `max_window_layers`.
    """
    first = reader.count("max_window_layers", 28)
    window: int | None = None
    if reader.flag("use_sliding_window", False) and not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window", 4096)
    reader.get("sliding_window")  # written without use_sliding_window, too
    default = [SLIDING if window and slides(layer, first) else FULL for layer in range(num_layers)]
    types = read_layer_types(reader, num_layers, default)
    if window is not None:
        return windows_of(types, window)
    if SLIDING in types:
        raise reader.refuse("layer_types", SLIDING, "contradicts a config without a window")
    return (None,) * num_layers
