"""Qwen 2 and 3 mixtures of experts: sparse and dense layers, in Qwen 2 a shared expert."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.model import qwen2, qwen3
from loraplex_services.worker.model.build import Builder, dense_mlp
from loraplex_services.worker.model.config_reader import ModelConfigReader
from loraplex_services.worker.model.decoder import Decoder, Mlp
from loraplex_services.worker.model.sparse import ExpertNames, read_num_active, sparse_mlp
from loraplex_services.worker.types.model_config import ModelConfig, MoeConfig

NAMES = ExpertNames()
SHARED_SIZE = "shared_expert_intermediate_size"


def read_qwen2_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of Qwen 2 MoE."""
    config = qwen2.read_config(reader, eos_token_ids, replace(qwen2.DEFAULTS, num_kv_heads=16))
    moe = read_moe(reader, config, 4, 60, shared_size=5632)
    has_bias = reader.flag("qkv_bias", True)
    windows = qwen2.read_windows(reader, config.num_layers, _slides_in_qwen2)
    return replace(config, model_type="qwen2_moe", qkv_bias=has_bias, moe=moe, windows=windows)


def _slides_in_qwen2(layer: int, first: int) -> bool:
    """Every other layer below `max_window_layers` has the window, where dense bases have it from
    this layer on."""
    return layer % 2 == 0 and layer < first


def read_qwen3_config(reader: ModelConfigReader, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Translate config.json of Qwen 3 MoE."""
    reader.get("layer_types")  # the library does not read it here: all layers have the window
    own = reader.without("layer_types")
    reader.get(SHARED_SIZE)  # left over from Qwen 2 MoE, without an effect here
    defaults = replace(qwen3.DEFAULTS, head_dim=None, num_kv_heads=4)
    config = qwen3.read_config(own, eos_token_ids, defaults)
    windows = qwen2.read_windows(own, config.num_layers, lambda layer, first: True)
    moe = read_moe(own, config, 8, 128)
    return replace(config, model_type="qwen3_moe", moe=moe, windows=windows)


def read_moe(
    reader: ModelConfigReader,
    config: ModelConfig,
    num_active: int,
    num_experts: int,
    shared_size: int | None = None,
) -> MoeConfig:
    """The experts of a family, with its defaults. Files spell their number in two ways.

    `shared_size`: default width of the shared expert; None = the family has none.
    """
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise reader.refuse("mlp_only_layers", dense, "must be a list of layers")
    count = reader.integer("num_experts", reader.integer("num_local_experts", num_experts))
    return MoeConfig(
        num_experts=count,
        num_active=read_num_active(reader, count, num_active),
        intermediate_size=reader.integer("moe_intermediate_size"),
        renormalise=reader.flag("norm_topk_prob", False),
        shared_intermediate_size=shared_size and reader.integer(SHARED_SIZE, shared_size),
        dense_layers=tuple(
            layer for layer in range(config.num_layers) if layer in dense or (layer + 1) % step != 0
        ),
    )


def assemble(builder: Builder) -> Decoder:
    """The model with its weights."""
    return builder.build(_mlp)


def _mlp(builder: Builder, layer: int) -> Mlp:
    moe = builder.config.moe
    assert moe is not None, "read_config sets it"
    if layer in moe.dense_layers:
        return dense_mlp(builder, layer)
    return sparse_mlp(builder, layer, NAMES)
