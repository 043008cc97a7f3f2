"""Bases and adapters of real geometry and random weights, made once in a work folder."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANKS = (8, 16, 32, 64)
FIRST_ORDINARY_TOKEN = 300


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each projection, by module name inside a layer."""
        hidden, width = self.hidden_size, self.intermediate_size
        kv = hidden // self.num_heads * self.num_kv_heads
        return {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden, kv),
            "self_attn.v_proj": (hidden, kv),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (hidden, width),
            "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden),
        }

    @property
    def num_weights(self) -> int:
        """Weights that a decode step reads: all linears and the head."""
        linears = sum(i * o for i, o in self.linears.values())
        return self.num_layers * linears + self.vocab_size * self.hidden_size

    def num_adapter_weights(self, rank: int) -> int:
        """A and B of an adapter on every linear."""
        return self.num_layers * rank * sum(i + o for i, o in self.linears.values())


SHAPES = {
    "135m": Shape("135m", 49152, 576, 1536, 30, 9, 3),
    "500m": Shape("500m", 151936, 896, 4864, 24, 14, 2),
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
    if (folder / "adapter_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rank, generator = rank_of(adapter), torch.Generator().manual_seed(adapter)
    tensors = {}
    for layer in range(shape.num_layers):
        for name, (num_inputs, num_outputs) in shape.linears.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
            b = torch.randn(num_outputs, rank, generator=generator) * 0.02
            tensors[f"{module}.lora_A.weight"] = a.bfloat16()
            tensors[f"{module}.lora_B.weight"] = b.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(root / shape.name),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.split(".")[1] for name in shape.linears],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make_prompts(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """64 to 128 random tokens each."""
    rng = random.Random(seed)
    return [
        [rng.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(rng.randint(64, 128))]
        for _ in range(count)
    ]
