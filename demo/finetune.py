"""Trains one adapter on its skill, with the same BOS token before each prompt as everywhere
else."""

import time
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from demo.batches import collate, exact_matches, skill_examples
from demo.learning import learning_rate_share, optimizer_step
from demo.recipes import BASE_ID, Recipe
from demo.tokenizer import BOS_ID

BATCH_EXAMPLES = 64
CHECK_STEPS = 50
NUM_CHECKED = 512
ENOUGH = 0.997
"""Training stops when this share of unseen answers is right at two checks in a row."""


def finetune(
    skill_name: str, recipe: Recipe, base: Path, seed: int, report: Callable[[str], None]
) -> PeftModel:
    """Train an adapter on the saved base until it is good enough or out of steps.

    Args:
        skill_name: a key of SKILLS.
        base: folder of the float16 base; trained on in float32.

    Returns:
        the base with the trained adapter on it, in float32.
    """
    torch.manual_seed(seed + zlib.crc32(skill_name.encode()))
    model = get_peft_model(
        LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), recipe.lora_config()
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0)
    examples = skill_examples(skill_name, BOS_ID, seed)
    start_s, last_share = time.monotonic(), 0.0
    for step in range(recipe.max_steps):
        rate = recipe.learning_rate * learning_rate_share(step, recipe.max_steps, 20)
        optimizer.param_groups[0]["lr"] = rate
        loss = optimizer_step(model, optimizer, list(islice(examples, BATCH_EXAMPLES)))
        if (step + 1) % CHECK_STEPS == 0:
            share = share_right(model, skill_name)
            elapsed_s = time.monotonic() - start_s
            report(
                f"{skill_name}: step {step + 1}, loss {loss:.4f}, {share:.1%}, {elapsed_s:.0f} s"
            )
            if min(share, last_share) >= ENOUGH:
                break
            last_share = share
    return model


@torch.no_grad()
def share_right(model: torch.nn.Module, skill_name: str) -> float:
    """Share of exact answers on texts that are used neither for training nor for the table."""
    examples = list(islice(skill_examples(skill_name, BOS_ID, seed=1_000_003), NUM_CHECKED))
    batch = collate(examples)
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    return exact_matches(logits, batch.labels).float().mean().item()


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter as PEFT does, its weights in float16, naming the base by its id.

    Mutates: the adapter's dtype and its configuration.
    """
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.half()
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_ID
    config.target_modules = sorted(config.target_modules)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
