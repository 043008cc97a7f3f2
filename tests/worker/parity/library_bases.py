"""Tiny bases of families without code here: they run through the transformers library."""

from __future__ import annotations

from tests.worker.parity.base_fields import LLAMA4, LLAMA4_MULTIMODAL

LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWED_EXPERTS = {**EXPERTS, "num_hidden_layers": 4, "sliding_window": 17, "head_dim": 16}
WINDOWED_GRANITE = {"num_hidden_layers": 4, "sliding_window": 17, "attention_multiplier": 0.2}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
"""Latent attention, whose values are narrower than its keys."""

LIBRARY_BASES: dict[str, tuple[str, dict[str, object]]] = {
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "granite-moe": ("GraniteMoeConfig", LOCAL_EXPERTS),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 17, "num_hidden_layers": 4}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 17, "num_hidden_layers": 4}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 17}),
    "gemma": ("GemmaConfig", {"head_dim": 24}),
    "phi": ("PhiConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "exaone4": ("Exaone4Config", {"sliding_window": 17, "num_hidden_layers": 4, "head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "apertus": ("ApertusConfig", {}),
    "ernie": ("Ernie4_5Config", {}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "gpt2": ("GPT2Config", {}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon": ("FalconConfig", {"bias": True}),
    "falcon-not-parallel": ("FalconConfig", {"multi_query": False, "parallel_attn": False}),
    "falcon-new": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "llama4": ("Llama4Config", LLAMA4_MULTIMODAL),
    "llama4-dense": ("Llama4TextConfig", {**LLAMA4, "moe_layers": [1], "use_qk_norm": False}),
    "deepseek-v2": ("DeepseekV2Config", LATENT),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4-moe": ("Glm4MoeConfig", {**ROUTED, "head_dim": 16, "use_qk_norm": True}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", LATENT),
    "minimax-m2": ("MiniMaxM2Config", {**LOCAL_EXPERTS, "head_dim": 24, "rotary_dim": 12}),
    "afmoe": (
        "AfmoeConfig",
        {**WINDOWED_EXPERTS, "head_dim": 24, "mup_enabled": True, "route_scale": 1.5},
    ),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.8}),
    "olmoe": ("OlmoeConfig", EXPERTS),
    "flex-olmo": ("FlexOlmoConfig", EXPERTS),
    "phimoe": ("PhimoeConfig", {**LOCAL_EXPERTS, "attention_bias": True, "lm_head_bias": False}),
    "ernie-moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
        },
    ),
    "exaone-moe": ("ExaoneMoeConfig", WINDOWED_EXPERTS),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {**LOCAL_EXPERTS, "shared_intermediate_size": 40},
    ),
    "hy-v3": ("HYV3Config", {**EXPERTS, "head_dim": 16}),
    "mimo-v2": (
        "MiMoV2FlashConfig",
        {
            **ROUTED,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 17,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "solar-open": ("SolarOpenConfig", {**ROUTED, "head_dim": 16}),
    "dots1": ("Dots1Config", {**ROUTED, "head_dim": 16}),
    "cohere2-moe": ("Cohere2MoeConfig", WINDOWED_EXPERTS),
    "mellum": ("MellumConfig", WINDOWED_EXPERTS),
    "arcee": ("ArceeConfig", {}),
    "cwm": ("CwmConfig", {"sliding_window": 17, "num_hidden_layers": 4}),
    "minicpm3": ("MiniCPM3Config", LATENT),
    "jais2": ("Jais2Config", {"head_dim": 16}),
    "gpt-bigcode": ("GPTBigCodeConfig", {"n_inner": 96}),
    "ministral": ("MinistralConfig", {"head_dim": 24, "sliding_window": 17}),
    "vaultgemma": ("VaultGemmaConfig", {"head_dim": 24, "sliding_window": 17}),
    "nanochat": ("NanoChatConfig", {"head_dim": 16}),
    "hyperclovax": ("HyperCLOVAXConfig", {"head_dim": 16}),
    "granite-4-dense": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 136,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
        },
    ),
    "granite-swa": ("GraniteSWAConfig", WINDOWED_GRANITE),
    "granite-moe-swa": ("GraniteMoeSWAConfig", {**LOCAL_EXPERTS, **WINDOWED_GRANITE}),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "longcat": (
        "LongcatFlashConfig",
        {
            **LATENT,
            "num_layers": 1,
            "ffn_hidden_size": 136,
            "moe_topk": 3,
            "zero_expert_num": 2,
            "head_dim": 8,
            "expert_ffn_hidden_size": 24,
        },
    ),
    "persimmon": ("PersimmonConfig", {}),
    "internlm3": ("InternLM3Config", {"head_dim": 16}),
    "iquestcoder": ("IQuestCoderConfig", {"head_dim": 16}),
    # When the library loads it, it sets the row of the padding token to zero.
    "youtu": ("YoutuConfig", {**LATENT, "pad_token_id": None}),
    "axk1": ("AXK1Config", LATENT),
    "kolibri1": ("Kolibri1Config", {**WINDOWED_EXPERTS, "shared_expert_intermediate_size": 40}),
    "flint": ("FlintConfig", {**WINDOWED_EXPERTS, "shared_expert_intermediate_size": 40}),
}
"""Name -> (transformers config class, what differs from COMMON)."""
