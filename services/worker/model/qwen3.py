"""Qwen 3: normalised query and key heads, a separate head size, no biases by default."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.plain import Defaults, read_plain
from loraplex_services.worker.model.qwen2 import read_windows
from loraplex_services.worker.types.model_config import ModelConfig

DEFAULTS = Defaults(head_dim=128, num_kv_heads=32, max_position_embeddings=32768)


def read_config(
    reader: ModelConfigReader, eos_token_ids: tuple[int, ...], defaults: Defaults = DEFAULTS
) -> ModelConfig:
    """Translate config.json."""
    config = read_plain(reader, "qwen3", eos_token_ids, defaults)
    has_bias = reader.flag("attention_bias", False)
    return replace(
        config,
        qk_norm=True,
        qkv_bias=has_bias,
        o_bias=has_bias,
        windows=read_windows(reader, config.num_layers),
    )
