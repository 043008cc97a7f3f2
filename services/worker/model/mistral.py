"""Mistral: Llama with one sliding window for every layer, or with none."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.plain import Defaults, read_plain
from loraplex_services.worker.types.model_config import ModelConfig

WINDOW_WHEN_ABSENT = 4096
"""An absent key means the first Mistral's window; later files say null."""


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json."""
    defaults = Defaults(num_kv_heads=8, max_position_embeddings=4096 * 32)
    config = read_plain(reader, "mistral", eos_token_ids, defaults)
    window: int | None = None
    if not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window", WINDOW_WHEN_ABSENT)
    return replace(config, windows=(window,) * config.num_layers)
