"""Phi 3: qkv and gate_up are single modules in the files; part of each head may rotate."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model.build import LayerNames
from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.plain import Defaults, read_plain
from loraplex_services.worker.types.model_config import ModelConfig

NAMES = LayerNames(fused_qkv=True)


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json."""
    defaults = Defaults(
        norm_eps=1e-5,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rotates_part=True,
    )
    config = read_plain(reader, "phi3", eos_token_ids, defaults)
    reader.get("original_max_position_embeddings")  # written without scaling, too
    window = reader.optional_integer("sliding_window")
    return replace(config, windows=(window,) * config.num_layers)
