"""Tiny random models of each family, saved to disk once per test session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

torch.set_num_threads(1)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}

FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied-bias": lambda: transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=8),
}


def build(family: str) -> torch.nn.Module:
    """A model with seeded random weights."""
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())


def save(family: str, folder: Path) -> Path:
    """Save a family's model under `folder`; returns its path."""
    path = folder / family
    build(family).save_pretrained(path)
    return path
