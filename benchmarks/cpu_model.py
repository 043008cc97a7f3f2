"""Bases and adapters of real geometry and random weights, made once in a work folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.llama import Shape, write_adapter

RANKS = (8, 16, 32, 64)
FIRST_ORDINARY_TOKEN = 300


SHAPES = {
    "135m": Shape("135m", 49152, 576, 1536, 30, 9, 3),
    "500m": Shape("500m", 151936, 896, 4864, 24, 14, 2),
    "1500m": Shape("1500m", 151936, 1536, 8960, 28, 12, 2),
}


def rank_of(adapter: int) -> int:
    """Ranks go round."""
    return RANKS[adapter % len(RANKS)]


def make_base(shape: Shape, root: Path) -> Path:
    """A bfloat16 checkpoint as transformers writes it."""
    folder = root / shape.name
    if not folder.exists():
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_adapter(shape: Shape, root: Path, adapter: int) -> Path:
    """A bfloat16 adapter on every linear."""
    folder = root / f"{shape.name}-lora-{adapter:03d}"
    return write_adapter(shape, folder, rank_of(adapter), torch.bfloat16, seed=adapter)


def make_prompts(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """64 to 128 random tokens each."""
    rng = random.Random(seed)
    return [
        [rng.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(rng.randint(64, 128))]
        for _ in range(count)
    ]
