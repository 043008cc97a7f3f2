"""Mixtral: Mistral with eight experts per layer, of which two are active."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model.build import Builder
from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.model.plain import Defaults, read_plain
from loraplex_services.worker.model.sparse import ExpertNames, read_num_active, sparse_mlp
from loraplex_services.worker.types.model_config import ModelConfig, MoeConfig

NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def read_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json."""
    defaults = Defaults(
        num_kv_heads=8, norm_eps=1e-5, max_position_embeddings=4096 * 32, rope_theta=1e6
    )
    config = read_plain(reader, "mixtral", eos_token_ids, defaults)
    num_experts = reader.integer("num_local_experts", 8)
    moe = MoeConfig(
        num_experts=num_experts,
        num_active=read_num_active(reader, num_experts, 2),
        intermediate_size=config.intermediate_size,
        renormalise=True,
    )
    window = reader.optional_integer("sliding_window")
    return replace(config, moe=moe, windows=(window,) * config.num_layers)


def assemble(builder: Builder) -> Decoder:
    """The model with its weights."""
    return builder.build(lambda builder, layer: sparse_mlp(builder, layer, NAMES))
