"""Llama 2 to 3.x: grouped-query attention, scaled rotary embeddings, optional biases."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.plain import read_plain
from loraplex_services.worker.types.model_config import ModelConfig


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json."""
    has_bias = reader.flag("attention_bias", False)
    return replace(
        read_plain(reader, "llama", eos_token_ids),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=reader.flag("mlp_bias", False),
    )
