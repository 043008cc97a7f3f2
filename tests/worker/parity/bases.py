"""Tiny random bases of real geometry, written as Hugging Face writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests.worker.parity.base_fields import COMMON, QWEN_VISION, VISION
from tests.worker.parity.gemma4_bases import GEMMA4_BASES
from tests.worker.parity.library_bases import LIBRARY_BASES


def _rope(**params: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 10000.0, **params}}


LLAMA3_ROPE = _rope(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN_ROPE = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)

DELTA_NETS = {
    # A query and a key may be nearly orthogonal. What is read is then almost nothing but rounding
    # errors, and the norm multiplies it with up to 1 / sqrt(eps), in transformers as here.
    "rms_norm_eps": 1e-2,
    "head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    **_rope(rope_type="default", partial_rotary_factor=0.5),
}
"""Recurrent layers, and attention as published models have it next to them."""
OF_IMAGES = _rope(
    rope_type="default",
    partial_rotary_factor=0.5,
    mrope_section=[2, 2, 2],
    mrope_interleaved=True,
)
EVERY_SECOND = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
"""Published models have attention in every fourth layer, in which tiny adapters change little."""
QWEN_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}

BASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3-rope-tied": ("LlamaConfig", {**LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear-rope": ("LlamaConfig", _rope(rope_type="linear", factor=2.0)),
    "llama-yarn-biases": ("LlamaConfig", {**YARN_ROPE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "mistral-no-window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 24, "query_pre_attn_scalar": 30, "sliding_window": 17},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 24, "sliding_window": 19, "num_hidden_layers": 6, "hidden_size": 48},
    ),
    **GEMMA4_BASES,
    "phi3": ("Phi3Config", {}),
    "phi3-partial-rope": ("Phi3Config", _rope(partial_rotary_factor=0.5, rope_type="default")),
    "phi3-longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [1.5 + 0.7 * i for i in range(8)],
                "original_max_position_embeddings": 48,
            },
        },
    ),
    "llama-dynamic-rope": ("LlamaConfig", _rope(rope_type="dynamic", factor=3.0)),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 21}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3.5": ("Qwen3_5TextConfig", {**DELTA_NETS, **EVERY_SECOND}),
    "qwen3.5-multimodal": (
        "Qwen3_5Config",
        {
            "text_config": {
                **COMMON,
                **DELTA_NETS,
                **OF_IMAGES,
                "num_hidden_layers": 5,
                "layer_types": [*EVERY_SECOND["layer_types"], "full_attention"],
                "tie_word_embeddings": True,
            },
            "vision_config": QWEN_VISION,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeConfig",
        {
            "text_config": {**COMMON, **DELTA_NETS, **OF_IMAGES, **QWEN_EXPERTS, **EVERY_SECOND},
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {**DELTA_NETS, **QWEN_EXPERTS, **EVERY_SECOND, "mlp_only_layers": [1]},
    ),
    "llama-mha-head-dim": ("LlamaConfig", {"num_key_value_heads": 4, "head_dim": 24}),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 24,
            "sliding_window": 17,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "swiglu_limit": 0.7,
            **_rope(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
            ),
        },
    ),
    "gemma3-multimodal": (
        "Gemma3Config",
        {
            "text_config": {
                **COMMON,
                "head_dim": 24,
                "sliding_window": 19,
                "num_hidden_layers": 6,
                "hidden_size": 48,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "linear",
                        "factor": 8.0,
                        "rope_theta": 1000000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3-multimodal": (
        "Mistral3Config",
        {
            "text_config": {**COMMON, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": (
        "Mistral3Config",
        {
            "text_config": {
                **COMMON,
                "model_type": "ministral3",
                "head_dim": 24,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1000000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 32,
                    "max_position_embeddings": 512,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            },
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": True,
        },
    ),
    "llava": (
        "LlavaConfig",
        {
            "text_config": {**COMMON, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
        },
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        {
            "text_config": {**COMMON, **_rope(rope_type="default", mrope_section=[2, 3, 3])},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": {
                **COMMON,
                **_rope(rope_type="default", mrope_section=[2, 3, 3]),
                "use_sliding_window": True,
                "sliding_window": 18,
                "max_window_layers": 1,
            },
            "vision_config": QWEN_VISION,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {
                **COMMON,
                **_rope(rope_type="default", mrope_section=[2, 3, 3], mrope_interleaved=True),
                "num_hidden_layers": 3,
                "num_experts": 6,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "mlp_only_layers": [1],
                "tie_word_embeddings": False,
            },
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        },
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {
            "text_config": {
                **COMMON,
                "head_dim": 24,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5000000.0,
                    "mrope_section": [4, 4, 4],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": False,
        },
    ),
}
"""Name -> (transformers config class, what differs from COMMON). With a `text_config`, which then
holds all of COMMON, it is a multimodal base."""


@dataclass(frozen=True, slots=True)
class TinyBase:
    """A base on disk and as transformers runs it, float32 and eager."""

    name: str
    folder: Path
    model: transformers.PreTrainedModel

    @property
    def config(self) -> transformers.PretrainedConfig:
        """Of its text model."""
        return self.model.config.get_text_config()

    @property
    def is_multimodal(self) -> bool:
        """Whether its files hold a vision tower, too."""
        return self.config is not self.model.config

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the head; a wrapper's own config decides."""
        return self.model.config.tie_word_embeddings is True


def config_of(name: str, **fields: object) -> transformers.PretrainedConfig:
    """The config of a base, with other values of some fields."""
    class_name, changes = {**BASES, **LIBRARY_BASES}[name]
    own = changes if "text_config" in changes else {**COMMON, **changes}
    return getattr(transformers, class_name)(**{**own, **fields})


def _deviation(base_name: str, parameter_name: str) -> float:
    """Of a parameter's random values."""
    if "gemma" in base_name and "embed" in parameter_name:
        return 0.02  # it multiplies them by sqrt(hidden); large ones would drown the layers
    if "conv1d" in parameter_name:
        return 0.5
    return 0.15


def make_base(
    name: str, folder: Path, *, shard_bytes: int | None = None, **fields: object
) -> TinyBase:
    """Random weights, seeded by the name; norms and biases are random, too. `fields` replace those
    of the config."""
    config = config_of(name, **fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # torch 2.11 has no grouped products in float64
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    torch.manual_seed(0)
    is_multimodal = config.get_text_config() is not config
    auto = "AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()
    set_swiglu_limit(model)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        else:
            deviation = _deviation(name, parameter_name)
            parameter.data.normal_(0.0, deviation, generator=generator)
        parameter.requires_grad_(False)
    for buffer_name, buffer in model.named_buffers():
        if "layer_scalar" in buffer_name or "correction_bias" in buffer_name:
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    shards = {"max_shard_size": shard_bytes} if shard_bytes else {}
    model.save_pretrained(folder, **shards)
    return TinyBase(name, folder, model)


def set_swiglu_limit(model: transformers.PreTrainedModel) -> None:
    """Some releases of transformers (5.17) do not read it from the config of gpt-oss."""
    limit = getattr(model.config, "swiglu_limit", None)
    for module in model.modules():
        if limit is not None and hasattr(module, "limit"):
            module.limit = limit
