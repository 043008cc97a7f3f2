"""Bases of drawn sizes and adapters of drawn PEFT fields, for what nobody thought of listing."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tests.worker.parity.adapters import draw
from tests.worker.parity.bases import TinyBase

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]
CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "mixtral": "MixtralConfig",
    "qwen2-moe": "Qwen2MoeConfig",
    "qwen3-moe": "Qwen3MoeConfig",
}
HAVE_NO_HEAD_DIM = ("qwen2", "phi3", "qwen2-moe")
INVOCATION = [5, 6, 7]

Fields = dict[str, Any]


def draw_base(rng: random.Random, folder: Path) -> TinyBase:
    """A family, sizes that are multiples of nothing in particular, and random weights; published in
    one of three dtypes, in one file or several."""
    family = rng.choice(list(CLASSES))
    config = getattr(transformers, CLASSES[family])(**_config_fields(rng, family))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for name, parameter in model.named_parameters():
        is_scaled_table = "gemma" in family and "embed" in name
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data += 0.1 * noise
        else:
            parameter.data.copy_((0.02 if is_scaled_table else 0.15) * noise)
    model.to(rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    model.save_pretrained(folder, max_shard_size=rng.choice(["60KB", "1GB"]))
    if rng.random() < 0.3:
        (folder / "generation_config.json").unlink(missing_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return TinyBase(family, folder, model.eval().requires_grad_(False))


def _config_fields(rng: random.Random, family: str) -> Fields:
    num_kv_heads, head_dim = rng.choice([1, 1, 2, 3]), rng.choice([8, 16, 20, 24, 32, 40])
    num_heads = num_kv_heads * rng.choice([1, 2, 3, 4])
    fields: Fields = {
        "vocab_size": rng.choice([257, 300, 311, 320, 513, 1001]),
        "hidden_size": num_heads * rng.choice([head_dim, 12, 16, 20]),
        "intermediate_size": rng.choice([52, 72, 136, 200]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": rng.choice([128, 256, 512]),
        "eos_token_id": rng.choice([3, [3, 4], 2]),
        "bos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": rng.random() < 0.4,
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 1e-3]),
    }
    if family in HAVE_NO_HEAD_DIM:
        fields["hidden_size"] = num_heads * head_dim
    else:
        fields["head_dim"] = head_dim
    if "gemma" not in family and family != "phi3":
        fields["rope_parameters"] = _rope(rng)
    return fields | _family_fields(rng, family, head_dim)


def _family_fields(rng: random.Random, family: str, head_dim: int) -> Fields:
    window = rng.choice([None, 7, 17, 40])
    scaled = {"query_pre_attn_scalar": rng.choice([16, 30, 64]), "sliding_window": window or 9}
    experts = {
        "num_experts": rng.choice([3, 5]),
        "num_experts_per_tok": rng.choice([1, 2]),
        "moe_intermediate_size": 40,
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice([1, 2]),
    }
    first_layers = {"max_window_layers": rng.choice([0, 1]), "use_sliding_window": True}
    windowed = {**first_layers, "sliding_window": window} if window else {}
    by_family: dict[str, Fields] = {
        "llama": {"attention_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3},
        "mistral": {"sliding_window": window},
        "qwen2": windowed,
        "qwen3": {**windowed, "attention_bias": rng.random() < 0.3},
        "gemma2": {
            **scaled,
            "attn_logit_softcapping": rng.choice([None, 20.0]),
            "final_logit_softcapping": rng.choice([None, 10.0]),
        },
        "gemma3": {**scaled, "num_hidden_layers": rng.choice([2, 6, 7])},
        "phi3": {"sliding_window": window, "rope_parameters": _partial_rope(rng)},
        "mixtral": {
            "sliding_window": window,
            "num_local_experts": rng.choice([2, 4, 5]),
            "num_experts_per_tok": rng.choice([1, 2]),
        },
        "qwen2-moe": {**experts, "shared_expert_intermediate_size": 56},
        "qwen3-moe": {**experts, "mlp_only_layers": rng.choice([[], [0]])},
    }
    return by_family[family]


def _rope(rng: random.Random) -> Fields:
    length = rng.choice([32, 128])
    chosen = rng.choice(
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 3.5},
            {"rope_type": "dynamic", "factor": 2.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": length,
                **rng.choice(
                    [{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.3}]
                ),
                **rng.choice([{}, {"mscale": 0.7, "mscale_all_dim": 0.9}, {"truncate": False}]),
            },
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": length,
            },
        ]
    )
    return {"rope_theta": rng.choice([10000.0, 500000.0]), **chosen}


def _partial_rope(rng: random.Random) -> Fields:
    share = rng.choice([1.0, 0.5, 0.75])
    return {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": share}


def draw_adapter(rng: random.Random, base: TinyBase, folder: Path) -> Path | None:
    """An adapter of drawn fields, or None where PEFT itself cannot make it for the base."""
    fields = _lora_fields(rng, base)
    try:
        model = peft.get_peft_model(copy.deepcopy(base.model), peft.LoraConfig(**fields))
    except ValueError:  # no module is left, or PEFT does not combine two features
        return None
    draw(model, torch.Generator().manual_seed(rng.randrange(1 << 30)))
    if rng.random() < 0.25:
        model.to(rng.choice([torch.float16, torch.bfloat16]))
    model.save_pretrained(folder)
    return folder


def _lora_fields(rng: random.Random, base: TinyBase) -> Fields:
    has_experts = base.name in ("mixtral", "qwen2-moe", "qwen3-moe")
    attention = ["qkv_proj", "o_proj"] if base.name == "phi3" else ATTENTION
    others = ["gate_up_proj", "down_proj"] if base.name == "phi3" else FEED_FORWARD
    linears = attention if has_experts else attention + others
    some = rng.sample(linears, rng.randrange(1, len(linears) + 1))
    layer = rng.randrange(base.config.num_hidden_layers)
    fields: Fields = {
        "task_type": "CAUSAL_LM",
        "r": rng.choice([1, 2, 3, 4, 8, 16, 24]),
        "lora_alpha": rng.choice([1, 7, 16, 32]),
        "use_rslora": rng.random() < 0.25,
        "target_modules": some,
    }
    fields |= rng.choice(
        [
            {},
            {},
            {"target_modules": rf".*\.({'|'.join(some)})"},
            {"layers_to_transform": layer},
            {"layers_to_transform": [layer], "layers_pattern": "layers"},
            {"exclude_modules": [attention[-1]]},
        ]
    )
    pattern = rng.choice(
        [attention[0], r"layers\.0\..*", rf"^model\.layers\.\d+\..*{attention[-1]}"]
    )
    fields |= rng.choice([{}, {}, {"rank_pattern": {pattern: 5}}, {"alpha_pattern": {pattern: 40}}])
    fields |= rng.choice([{}, {}, {"use_dora": True}, {"lora_bias": True}, {"bias": "lora_only"}])
    return fields | rng.choice([{}, {}, {}, *_special(rng, base, has_experts=has_experts)])


def _special(rng: random.Random, base: TinyBase, *, has_experts: bool) -> list[Fields]:
    found: list[Fields] = [
        {"modules_to_save": ["norm"]},
        {"modules_to_save": ["input_layernorm"]},
        {"trainable_token_indices": sorted(rng.sample(range(base.config.vocab_size), 3))},
        {"alora_invocation_tokens": INVOCATION, "bias": "none"},
    ]
    if not base.is_tied:
        found += [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}]
    if has_experts:
        plain = {"use_dora": False, "lora_bias": False}
        found.append({**plain, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]})
    return found
