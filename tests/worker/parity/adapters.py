"""Random adapters as PEFT writes them, one for each feature of LoRA."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import peft
import torch

from tests.worker.parity.bases import TinyBase

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

FEATURES: dict[str, dict[str, object]] = {
    "rank-1": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    "rank-4-attention": {"r": 4, "target_modules": ATTENTION},
    "rank-8-all-linear": {"r": 8, "target_modules": "all-linear"},
    "rank-16-mlp": {"r": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "rank-33-odd": {"r": 33, "target_modules": ["k_proj", "down_proj"]},
    "rank-64-all-linear": {"r": 64, "target_modules": "all-linear"},
    "rslora": {"r": 16, "use_rslora": True, "target_modules": "all-linear"},
    "dora": {"r": 8, "use_dora": True, "target_modules": "all-linear"},
    "dora-rslora-attention": {
        "r": 5,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["q_proj", "o_proj", "up_proj"],
    },
    "patterns": {
        "r": 6,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 12, r"layers\.1\.mlp\.down_proj": 3},
        "alpha_pattern": {"k_proj": 40, "o_proj": 1},
    },
    "one-layer": {"r": 8, "target_modules": ATTENTION, "layers_to_transform": [1]},
    "regex-excluded": {
        "r": 8,
        "target_modules": r".*\.(q_proj|gate_proj|down_proj)",
        "exclude_modules": r".*layers\.0.*",
    },
    "lm-head": {"r": 8, "target_modules": ["q_proj", "lm_head"]},
    "embedding": {"r": 8, "target_modules": ["embed_tokens", "v_proj"]},
    "lora-bias": {"r": 8, "lora_bias": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    "bias-all": {"r": 4, "bias": "all", "target_modules": ["q_proj"]},
    "bias-lora-only": {"r": 4, "bias": "lora_only", "target_modules": ["q_proj", "down_proj"]},
    "saved-tables": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "saved-norms": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["input_layernorm", "model.norm"],
    },
    "token-rows": {
        "r": 4,
        "target_modules": ["q_proj"],
        "trainable_token_indices": [7, 3, 200, 299],
    },
}

EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")

FUSED_NAMES = (
    (re.compile(r"(?<![a-z])[qkv]_proj"), "qkv_proj"),
    (re.compile(r"(?<![a-z])(gate|up)_proj"), "gate_up_proj"),
)


def _fused(value: object) -> object:
    """The same feature on a base whose projections are fused in its files."""
    if isinstance(value, str):
        for pattern, fused in FUSED_NAMES:
            value = pattern.sub(fused, value)
        return value
    if isinstance(value, list):
        return sorted({_fused(item) for item in value})
    if isinstance(value, dict):
        return {_fused(key): item for key, item in value.items()}
    return value


def features_of(base: TinyBase) -> list[str]:
    """Features that apply to a base. Experts take LoRA on parameters, which is not served."""
    if base.model.config.model_type not in EXPERT_FAMILIES:
        return list(FEATURES)
    return [
        name
        for name, fields in FEATURES.items()
        if not any(word in str(fields["target_modules"]) for word in ("gate_", "up_", "down_"))
    ]


def feature_config(base: TinyBase, feature: str) -> peft.LoraConfig:
    """The PEFT configuration of a feature on a base."""
    fields = FEATURES[feature]
    if base.name.startswith("phi3"):
        fields = {key: _fused(value) for key, value in fields.items()}
    if base.name in ("mixtral", "qwen3-moe") and fields["target_modules"] == "all-linear":
        fields = {**fields, "target_modules": ATTENTION}  # PEFT would take experts, too
    return peft.LoraConfig(**{"lora_alpha": 16, "task_type": "CAUSAL_LM", **fields})


def make_adapter(base: TinyBase, feature: str, folder: Path, *, seed: int = 0) -> Path:
    """Train nothing: give every LoRA tensor random values that move the logits, and save."""
    model = peft.get_peft_model(copy.deepcopy(base.model), feature_config(base, feature))
    generator = torch.Generator().manual_seed(seed + sum(map(ord, feature)))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_magnitude" in name:
            parameter.data *= 1.0 + 0.2 * noise
        elif "lora_" in name:
            parameter.data = 0.15 * noise
        elif parameter.requires_grad:  # biases, saved modules, token rows
            parameter.data += 0.15 * noise
    model.save_pretrained(folder)
    return folder
