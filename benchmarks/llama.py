"""Llamas by their geometry, and adapters with random weights for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from loraplex.adapter_format.config import CONFIG_FILE
from loraplex.adapter_format.safetensors_header import DTYPE_BYTES, TENSOR_FILE, encode_header

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_SEVEN = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


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
    def kv_size(self) -> int:
        """Width of keys, and of values."""
        return self.hidden_size // self.num_heads * self.num_kv_heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each projection of a layer."""
        hidden, width, kv = self.hidden_size, self.intermediate_size, self.kv_size
        return {
            "q_proj": (hidden, hidden),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (hidden, hidden),
            "gate_proj": (hidden, width),
            "up_proj": (hidden, width),
            "down_proj": (width, hidden),
        }

    @property
    def num_weights(self) -> int:
        """Weights that a decode step reads: all linears and the head."""
        linears = sum(i * o for i, o in self.linears.values())
        return self.num_layers * linears + self.vocab_size * self.hidden_size

    @property
    def num_layer_weights(self) -> int:
        """Weights of all linears, without the head, which is not in a captured step."""
        return self.num_weights - self.vocab_size * self.hidden_size

    def num_adapter_weights(self, rank: int, targets: Sequence[str] = ALL_SEVEN) -> int:
        """A and B of one adapter."""
        return self.num_layers * rank * sum(sum(self.linears[name]) for name in targets)

    def kv_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Keys and values of `num_tokens` positions."""
        return 2 * itemsize * self.num_layers * self.kv_size * num_tokens


LLAMA_2_7B = Shape("llama-2-7b", 32000, 4096, 11008, 32, 32, 32)
LLAMA_2_13B = Shape("llama-2-13b", 32000, 5120, 13824, 40, 40, 40)
LLAMA_3_8B = Shape("llama-3-8b", 128256, 4096, 14336, 32, 32, 8)


def write_base_config(shape: Shape, folder: Path, max_model_len: int) -> Path:
    """A base without weights: what `load_format="dummy"` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def module_name(layer: int, name: str) -> str:
    """The module of a projection in a base."""
    return f"model.layers.{layer}.{'self_attn' if name in ATTENTION else 'mlp'}.{name}"


def adapter_matrices(
    shape: Shape, rank: int, targets: Sequence[str] = ALL_SEVEN
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and shape of each matrix of an adapter, as PEFT writes them."""
    for layer in range(shape.num_layers):
        for name in targets:
            num_inputs, num_outputs = shape.linears[name]
            module = f"base_model.model.{module_name(layer, name)}"
            yield f"{module}.lora_A.weight", (rank, num_inputs)
            yield f"{module}.lora_B.weight", (num_outputs, rank)


def write_adapter(
    shape: Shape,
    folder: Path,
    rank: int,
    dtype: torch.dtype,
    *,
    seed: int,
    targets: Sequence[str] = ALL_SEVEN,
) -> Path:
    """An adapter as PEFT writes it, with small values. An existing one is kept."""
    if (folder / CONFIG_FILE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, size in adapter_matrices(shape, rank, targets):
        factor = size[1] ** -0.5 if ".lora_A." in name else 0.02
        tensors[name] = (torch.randn(size, generator=generator) * factor).to(dtype)
    save_file(tensors, folder / TENSOR_FILE, metadata={"format": "pt"})
    write_adapter_config(folder, shape, rank, targets)
    return folder


def write_hollow_adapter(
    shape: Shape, folder: Path, rank: int, dtype: str, targets: Sequence[str] = ALL_SEVEN
) -> int:
    """An adapter as long as a real one, whose values are zero and take no space on the disk.

    Args:
        folder: a new one.
        dtype: as safetensors names it.

    Returns: the position of the first value in `TENSOR_FILE`.
    """
    folder.mkdir(parents=True)
    matrices = adapter_matrices(shape, rank, targets)
    header = encode_header((name, dtype, size) for name, size in matrices)
    with (folder / TENSOR_FILE).open("xb") as file:
        file.write(header)
        num_weights = shape.num_adapter_weights(rank, targets)
        file.truncate(len(header) + DTYPE_BYTES[dtype] * num_weights)
    write_adapter_config(folder, shape, rank, targets)
    return len(header)


def write_adapter_config(folder: Path, shape: Shape, rank: int, targets: Sequence[str]) -> None:
    """`adapter_config.json` of an adapter with alpha twice its rank."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": shape.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config))
