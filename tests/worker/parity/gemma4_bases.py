"""Tiny bases of Gemma 4."""

from __future__ import annotations

from tests.worker.parity.base_fields import COMMON, VISION

GEMMA4 = {
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 19,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
GEMMA4_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 311}
GEMMA4_SMALL = {
    **GEMMA4,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    **GEMMA4_INPUTS,
}
"""As the small sizes: inputs of each layer's own, and layers that read the keys of others."""
GEMMA4_LARGE = {
    **GEMMA4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
"""As the large sizes: the values of full layers are their keys."""
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}
GEMMA4_VISION = {
    **VISION,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "position_embedding_size": 16,
}

GEMMA4_BASES: dict[str, tuple[str, dict[str, object]]] = {
    "gemma4": ("Gemma4TextConfig", GEMMA4_SMALL),
    "gemma4-all": (
        "Gemma4TextConfig",
        {**GEMMA4_SMALL, **GEMMA4_LARGE, **GEMMA4_EXPERTS, **GEMMA4_INPUTS},
    ),
    "gemma4-moe": ("Gemma4TextConfig", {**GEMMA4_LARGE, **GEMMA4_EXPERTS}),
    "gemma4-multimodal": (
        "Gemma4Config",
        {
            "text_config": {**COMMON, **GEMMA4_SMALL, "pad_token_id": 0},
            "vision_config": GEMMA4_VISION,
            "audio_config": None,
        },
    ),
    "gemma4-unified": (
        "Gemma4UnifiedConfig",
        {
            "text_config": {
                **COMMON,
                **{k: v for k, v in GEMMA4_LARGE.items() if "per_layer" not in k},
            },
            "vision_config": {
                "patch_size": 4,
                "mm_embed_dim": 32,
                "mm_posemb_size": 8,
                "output_proj_dims": 48,
            },
            "audio_config": None,
        },
    ),
}
