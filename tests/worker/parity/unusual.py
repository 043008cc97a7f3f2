"""Bases of random, odd geometry, and adapters that combine several features at once."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tests.worker.parity.adapters import ATTENTION, EXPERT_FAMILIES, draw
from tests.worker.parity.bases import TinyBase, set_swiglu_limit

FAMILIES = (
    "LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "Gemma2Config",
    "Gemma3TextConfig", "Phi3Config", "MixtralConfig", "Qwen2MoeConfig", "Qwen3MoeConfig",
)  # fmt: skip
RECENT_FAMILIES = (
    "Qwen3_5TextConfig", "Gemma4TextConfig", "GptOssConfig", "Qwen3NextConfig", "Ministral3Config",
)  # fmt: skip
"""Seeds from `FIRST_RECENT` on draw from these."""
FIRST_RECENT = 160
HEADS = ((7, 1), (3, 3), (5, 1), (6, 2), (9, 3), (1, 1), (8, 2))
"""(query heads, key heads)."""
RANKS = (1, 2, 3, 5, 7, 16, 31, 64, 255, 256)
MLP = ["gate_proj", "up_proj", "down_proj"]
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)
OWN_ROPES = ("Gemma2Config", "Gemma3TextConfig", "Phi3Config", *RECENT_FAMILIES)
"""Families that have ropes of other shapes, which the listed bases cover."""


def unusual_base(seed: int, folder: Path) -> TinyBase:
    """A random geometry of a random family, saved in a random dtype and number of shards."""
    rng = random.Random(seed)
    families = FAMILIES if seed < FIRST_RECENT else RECENT_FAMILIES
    family = families[seed % len(families)]
    heads, kv_heads = rng.choice(HEADS)
    vocab_size = rng.choice((97, 130, 257, 391))
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": rng.choice((20, 36, 52, 70, 90, 126)),
        "intermediate_size": rng.choice((33, 50, 94, 131)),
        "num_hidden_layers": rng.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice((2, 6, 10, 16, 20, 34)),
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "eos_token_id": [vocab_size - 1, 3],
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
    }
    fields |= _of_family(family, rng, fields)
    if family not in OWN_ROPES and fields["head_dim"] > 2:  # transformers scales two pairs or more
        fields["rope_parameters"] = _rope(seed)
    config = getattr(transformers, family)(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the others want widths in steps of 16 bytes
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    set_swiglu_limit(model)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_loud = "Gemma" in family and "embed" in name
        if parameter.dim() == 1:
            parameter.data += 0.1 * noise
        else:
            deviation = 0.5 if "conv1d" in name else 0.02 if is_loud else 0.15
            parameter.data.copy_(deviation * noise)
        parameter.data.copy_(parameter.data.to(dtype))  # what the file can hold
        parameter.requires_grad_(False)
    saved = copy.deepcopy(model).to(dtype)  # rotary tables of the model itself stay float32
    saved.save_pretrained(folder, max_shard_size=rng.choice(("20KB", "10GB")))
    return TinyBase(f"{family}-{seed}", folder, model)


def _rope(seed: int) -> dict[str, Any]:
    """A rotary embedding, drawn apart so that the other draws of a seed stay as they are."""
    rng = random.Random(f"rope {seed}")
    rope = {"rope_theta": rng.choice((10000.0, 500000.0)), **rng.choice(ROPES)}
    if rope["rope_type"] in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = rng.choice((32, 64))
    return rope


def _of_family(family: str, rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """What only some configs have."""
    window = {"sliding_window": rng.choice((5, 17, 33))}
    match family:
        case "LlamaConfig":
            biases = {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
            return {**biases, "hidden_size": fields["num_attention_heads"] * rng.choice((6, 11))}
        case "MistralConfig":
            return window
        case "MixtralConfig":
            return {**window, "num_local_experts": 3, "num_experts_per_tok": 2}
        case "Qwen2Config" | "Phi3Config":  # these have no head_dim of their own
            return {"hidden_size": fields["num_attention_heads"] * fields["head_dim"]}
        case "Gemma2Config" | "Gemma3TextConfig":
            width = fields["num_attention_heads"] * rng.choice((6, 11))
            return {**window, "query_pre_attn_scalar": rng.choice((9, 24)), "hidden_size": width}
        case "Qwen2MoeConfig" | "Qwen3MoeConfig":
            own = {
                "hidden_size": fields["num_attention_heads"] * fields["head_dim"],
                "shared_expert_intermediate_size": 22,
            }
            return {
                **(own if "2" in family else {}),
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 18,
                "norm_topk_prob": rng.random() < 0.5,
            }
        case "Qwen3_5TextConfig" | "Qwen3NextConfig":
            return _delta_nets(rng) | (_experts(rng) if "Next" in family else {})
        case "GptOssConfig":
            return {**window, "num_local_experts": 3, "num_experts_per_tok": 2, "swiglu_limit": 0.7}
        case "Gemma4TextConfig":
            return {**window, **_gemma4(rng, fields)}
    return {}


def _delta_nets(rng: random.Random) -> dict[str, Any]:
    """Layers of Qwen 3.5; why their epsilon is large: `bases.DELTA_NETS`."""
    num_heads, others = rng.choice((1, 2, 3)), rng.choice((0, 1, 2))
    return {
        "rms_norm_eps": 1e-2,
        "head_dim": rng.choice((16, 24, 32)),
        "num_hidden_layers": 2 + others,
        "layer_types": ["linear_attention"] * (1 + others) + ["full_attention"],
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads * rng.choice((1, 2, 3)),
        "linear_key_head_dim": rng.choice((8, 20)),
        "linear_value_head_dim": rng.choice((12, 24)),
        "linear_conv_kernel_dim": rng.choice((2, 4)),
    }


def _experts(rng: random.Random) -> dict[str, Any]:
    return {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
        "shared_expert_intermediate_size": 22,
        "norm_topk_prob": rng.random() < 0.5,
    }


def _gemma4(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Inputs of each layer's own and shared keys, as in small sizes; or keys that are values."""
    own = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size": rng.choice((48, 52)),
        "global_head_dim": rng.choice((16, 32, 48)),
        "head_dim": rng.choice((8, 16, 24)),
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0,
    }
    if rng.random() < 0.5:
        return own | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return own | {
        "hidden_size_per_layer_input": rng.choice((6, 8)),
        "vocab_size_per_layer_input": fields["vocab_size"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": rng.random() < 0.5,
    }


def unusual_adapter(base: TinyBase, seed: int, folder: Path) -> Path:
    """Random features of PEFT at once, random values, saved in a random dtype."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    config = _config(base, rng)
    model = peft.get_peft_model(copy.deepcopy(base.model), config)
    draw(model, generator, lora=0.15 / max(1.0, config.r / 32), other=0.1)
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return folder


def _config(base: TinyBase, rng: random.Random) -> peft.LoraConfig:
    config = base.model.config
    is_phi3, is_sparse = config.model_type == "phi3", config.model_type in EXPERT_FAMILIES
    attention = ["qkv_proj", "o_proj"] if is_phi3 else ATTENTION
    mlp = ["gate_up_proj", "down_proj"] if is_phi3 else MLP
    linears = attention if is_sparse else [*attention, *mlp]
    is_recurrent = "linear_attention" in (getattr(config, "layer_types", None) or ())
    if is_recurrent:
        linears = [*linears, "out_proj"]
    targets = rng.sample(linears, rng.randrange(1, len(linears) + 1))
    fields: dict[str, object] = {
        "r": rng.choice(RANKS),
        "lora_alpha": rng.choice((1, 8, 16.5, 64)),
        "use_rslora": rng.random() < 0.3,
        "use_dora": rng.random() < 0.3,
        "bias": rng.choice(("none", "none", "all", "lora_only")),
        "task_type": "CAUSAL_LM",
    }
    if config.model_type == "gpt_oss" and fields["bias"] == "all":
        fields["bias"] = "none"  # PEFT takes the biases of experts for some that it trains
    if not fields["use_dora"] and fields["bias"] == "none":
        fields["lora_bias"] = rng.random() < 0.3
    if rng.random() < 0.4 and len(targets) > 1:
        fields["rank_pattern"] = {targets[0]: rng.choice(RANKS)}
        fields["alpha_pattern"] = {targets[-1]: 5}
    if rng.random() < 0.3 and not config.tie_word_embeddings:
        targets += rng.sample(["embed_tokens", "lm_head"], rng.choice((1, 2)))
        if fields.get("lora_bias"):
            fields["lora_bias"] = False
    elif rng.random() < 0.3:
        ids = rng.sample(range(config.vocab_size), 3)
        fields["trainable_token_indices"] = ids
    saved = []
    if rng.random() < 0.3:
        saved.append("input_layernorm")
    if rng.random() < 0.2 and "o_proj" not in targets and not is_recurrent:
        saved.append("layers.0.self_attn.o_proj")
    fields["modules_to_save"] = saved or None
    fields["target_modules"] = targets
    if rng.random() < 0.2 and config.num_hidden_layers > 1 and not is_recurrent:
        fields["layers_to_transform"] = [1]
    return peft.LoraConfig(**fields)
