"""Bases and adapters of real geometry and random weights, made once in a work folder."""

from __future__ import annotations

import json
import random
from argparse import ArgumentParser
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.llama import Shape, write_adapter
from benchmarks.machine import options_of
from loraplex.adapter_format.quantisation import GGUF_BLOCKS
from loraplex_services.worker.native.isa import LEVELS, TORCH, choose_isa, half_is_fast, has_amx

RANKS = (8, 16, 32, 64)
FIRST_ORDINARY_TOKEN = 300


FILES = {"Q8_0": ("Q8_0", "Q8_0", "Q8_0"), "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K")}
"""Types of most linears, of some linears, and of the token embedding, in files of llama.cpp."""
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""The types of rows whose length is not a multiple of 256."""
FACTORS_AT = {"Q8_0": (0,), "Q5_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
"""Where half-precision factors are in a block."""
SHAPES = {
    "135m": Shape("135m", 49152, 576, 1536, 30, 9, 3),
    "500m": Shape("500m", 151936, 896, 4864, 24, 14, 2),
    "1500m": Shape("1500m", 151936, 1536, 8960, 28, 12, 2),
}


def base_options(doc: str | None, model: str = "135m") -> ArgumentParser:
    """A parser of the options that all benchmarks of an engine have: the base, and a folder for
    models."""
    parser = options_of(doc)
    parser.add_argument("--model", choices=tuple(SHAPES), default=model)
    parser.add_argument("--work-dir", type=Path, required=True, help="keep models here")
    return parser


def engine_options(
    doc: str | None, model: str = "135m", repetitions: int = 3, new_tokens: int = 64
) -> ArgumentParser:
    """The same, and how much to measure."""
    parser = base_options(doc, model)
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--new-tokens", type=int, default=new_tokens)
    return parser


def dtype_of(level: str = "auto") -> str:
    """The dtype in which a worker is faster at a level."""
    return "bfloat16" if half_is_fast(level) else "float32"


def peer_dtype_of(level: str = "auto") -> str:
    """The dtype in which torch and vLLM are faster at a level."""
    isa = choose_isa(level)
    is_half = has_amx() if isa == TORCH else LEVELS[isa].has_dot_products
    return "bfloat16" if is_half else "float32"


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


def make_gguf_folder(base: Path, file: str, root: Path) -> Path:
    """The folder that a worker makes of a GGUF file, with random codes and small scales."""
    folder = root / f"{base.name}-{file}"
    if folder.exists():
        return folder
    tensors, types = {}, defaultdict(list)
    rng = np.random.default_rng(0)
    for name, tensor in load_file(base / "model.safetensors").items():
        tensors[name] = tensor
        if not name.endswith(("_proj.weight", "embed_tokens.weight")):
            continue
        kind = _gguf_type(name, tensor.shape[1], *FILES[file])
        types[kind].append(name.removesuffix(".weight"))
        _, num_inputs, num_bytes = GGUF_BLOCKS[f"gguf-{kind}"]
        shape = len(tensor), tensor.shape[1] // num_inputs, num_bytes
        blocks = rng.integers(0, 256, shape, np.uint8)
        # Half-precision factors from 2^-14 to 2^-12, so that outputs stay finite.
        for begin in FACTORS_AT[kind]:
            blocks[..., begin + 1] = 4 + blocks[..., begin + 1] % 8
        tensors[name] = torch.from_numpy(blocks.reshape(len(tensor), -1))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "gguf", "tensor_types": types}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _gguf_type(name: str, num_inputs: int, most: str, some: str, table: str) -> str:
    """As llama.cpp chooses: `some` for `down_proj` and `v_proj`, mostly of every second layer, and
    other types for rows that are not whole blocks."""
    if "embed_tokens" in name:
        kind = table
    else:
        is_some = ("down_proj" in name or "v_proj" in name) and int(name.split(".")[2]) % 2 == 0
        kind = some if is_some else most
    return kind if num_inputs % GGUF_BLOCKS[f"gguf-{kind}"][1] == 0 else FALLBACKS[kind]


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
