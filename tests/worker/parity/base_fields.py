"""What tiny bases have in common."""

from __future__ import annotations

COMMON = {
    "vocab_size": 311,
    "hidden_size": 64,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": 310,
    "bos_token_id": 309,
    "pad_token_id": 308,
}

QWEN_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""A vision tower, whose weights are in the files of a multimodal base."""

LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "intermediate_size_mlp": 88,
    "num_local_experts": 3,
    "attention_chunk_size": 19,
    "no_rope_layer_interval": 2,
    "floor_scale": 8,
    "attn_scale": 0.4,
}
"""Chunks, and temperatures of layers without a rotary embedding, that short requests reach."""

LLAMA4_MULTIMODAL = {
    "text_config": {**COMMON, **LLAMA4},
    "vision_config": {
        **VISION,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
}
