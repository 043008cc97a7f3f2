"""A tiny gpt-oss as it is published: four-bit experts, biases in bfloat16, keys under two names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.worker.parity.base_fields import COMMON
from tests.worker.parity.bases import TinyBase

NUM_EXPERTS, HIDDEN, WIDTH = 3, 64, 32
CONFIG: dict[str, Any] = {
    **COMMON,
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 2,
    "head_dim": 24,
    "hidden_size": HIDDEN,
    "initial_context_length": 64,
    "intermediate_size": WIDTH,
    "layer_types": ["sliding_attention", "full_attention"],
    "model_type": "gpt_oss",
    "num_experts_per_tok": 2,
    "num_local_experts": NUM_EXPERTS,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 17,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def random_mxfp4(
    generator: torch.Generator, num_outputs: int, num_inputs: int
) -> tuple[Tensor, Tensor]:
    """Blocks and scales of all experts."""
    groups = (NUM_EXPERTS, num_outputs, num_inputs // 32)
    blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(121, 126, groups, dtype=torch.uint8, generator=generator)
    return blocks, scales


def write_published(folder: Path) -> Path:
    """The files, laid out as those of gpt-oss-20b."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    plain = {k: v for k, v in CONFIG.items() if k != "quantization_config"}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**plain))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.15 + (parameter.dim() == 1)
        projection = name.rpartition(".")[2]
        if projection == "gate_up_proj":
            packed = random_mxfp4(generator, 2 * WIDTH, HIDDEN)
        elif projection == "down_proj":
            packed = random_mxfp4(generator, HIDDEN, WIDTH)
        else:
            tensors[name] = values.bfloat16()
            continue
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def mxfp4_base(folder: Path) -> TinyBase:
    """The base in these files, with the model that transformers dequantises them to."""
    folder.mkdir(parents=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        write_published(folder),
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="eager",  # as in `make_base`
    )
    return TinyBase("gpt-oss-mxfp4", folder, model.float().eval().requires_grad_(False))
