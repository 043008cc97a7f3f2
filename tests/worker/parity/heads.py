"""Random classification and embedding adapters as PEFT writes them, and transformers' answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import peft
import torch
import transformers

from tests.worker.parity.bases import TinyBase

NUM_LABELS = {"plain": 3, "dora": 1, "bias": 2, "saved": 5, "whole": 70}
"""Feature -> labels of its head; the last fills more than one tile of the arena."""

FEATURES: dict[str, dict[str, object]] = {
    "plain": {"r": 4, "target_modules": "all-linear"},
    "dora": {"r": 6, "use_dora": True, "target_modules": ["q_proj", "o_proj", "v_proj"]},
    "bias": {"r": 3, "bias": "all", "target_modules": ["q_proj", "v_proj"]},
    "saved": {
        "r": 4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["score", "model.norm", "embed_tokens"],
    },
    "whole": {"r": 8, "use_rslora": True, "trainable_token_indices": [5, 3]},
}


def classifier(base: TinyBase, feature: str) -> transformers.PreTrainedModel:
    """The base as *ForSequenceClassification, its head random."""
    config = copy.deepcopy(base.model.config)
    config.num_labels = NUM_LABELS[feature]
    torch.manual_seed(3)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    model.model.load_state_dict(base.model.model.state_dict())
    return model.requires_grad_(False)


def embedder(base: TinyBase) -> transformers.PreTrainedModel:
    """The base as *Model."""
    model = transformers.AutoModel.from_config(copy.deepcopy(base.model.config)).eval()
    model.load_state_dict(base.model.model.state_dict())
    return model.requires_grad_(False)


def save_random(
    model: transformers.PreTrainedModel, folder: Path, seed: int, **fields: object
) -> peft.PeftModel:
    """PEFT's model with random weights that move the outputs, saved."""
    fields.setdefault("target_modules", ["q_proj"])
    if model.config.model_type == "phi3":  # its projections are fused
        fields["target_modules"] = "all-linear"
    tuned = peft.get_peft_model(model, peft.LoraConfig(lora_alpha=16, **fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "lora_magnitude" in name:
            parameter.data *= 1.0 + 0.2 * noise
        elif "lora_" in name:
            parameter.data.copy_(0.15 * noise)
        elif parameter.requires_grad:
            parameter.data += 0.15 * noise
    tuned.save_pretrained(folder)
    return tuned


@torch.inference_mode()
def logits_of(tuned: peft.PeftModel, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Of prompts in one padded batch, as transformers scores them."""
    pad = tuned.config.pad_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[pad] * (width - len(prompt))] for prompt in prompts])
    mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts])
    return tuned(input_ids=ids, attention_mask=mask).logits.tolist()


@torch.inference_mode()
def states_of(model: torch.nn.Module, prompt: Sequence[int]) -> torch.Tensor:
    """Hidden states `[tokens, H]` after the last norm."""
    return model(torch.tensor([list(prompt)])).last_hidden_state[0]
