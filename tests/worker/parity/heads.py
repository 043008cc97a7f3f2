"""Random classification and embedding adapters as PEFT writes them, and transformers' answers."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
import transformers

from loraplex.api.pooling import Pooling
from tests.worker.parity.adapters import EXPERT_FAMILIES, draw
from tests.worker.parity.bases import TinyBase
from tests.worker.parity.driving import Driver, Job, greedy

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
    draw(tuned, torch.Generator().manual_seed(seed))
    tuned.save_pretrained(folder)
    return tuned


@torch.inference_mode()
def logits_of(tuned: peft.PeftModel, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """As transformers scores them one by one: in a padded batch the longest prompt decides for all
    which factors of a longrope hold."""
    return [tuned(input_ids=torch.tensor([list(prompt)])).logits[0].tolist() for prompt in prompts]


@torch.inference_mode()
def states_of(model: torch.nn.Module, prompt: Sequence[int]) -> torch.Tensor:
    """Hidden states `[tokens, H]` after the last norm."""
    return model(torch.tensor([list(prompt)])).last_hidden_state[0]


@dataclass(frozen=True)
class HeadStage:
    """Classification adapters in slots, and transformers' model of each."""

    tuned: dict[str, peft.PeftModel]
    slots: dict[str, int]


def set_head_stage(base: TinyBase, driver: Driver, root: Path) -> HeadStage:
    """One adapter for each feature, in slots from 1 on."""
    tuned, slots = {}, {}
    for slot, (name, fields) in enumerate(FEATURES.items(), start=1):
        if base.model.config.model_type in EXPERT_FAMILIES:  # its experts are fused
            is_all = fields.get("target_modules", "all-linear") == "all-linear"
            fields = {**fields, "target_modules": ["q_proj", "o_proj"]} if is_all else fields
        model = classifier(base, name)
        tuned[name] = save_random(model, root / name, slot, task_type="SEQ_CLS", **fields)
        driver.load(slot, root / name)
        slots[name] = slot
    return HeadStage(tuned, slots)


def pooled(name: str, prompt: list[int], slot: int | None, pooling: Pooling, arrival: int) -> Job:
    """A request for a vector or a score."""
    request = greedy(name, prompt, 0)
    request.pooling = pooling
    return Job(request, () if slot is None else ((slot, 1.0),), arrival)


def score_jobs(stage: HeadStage) -> list[tuple[str, Job]]:
    """Three prompts for each adapter: (feature, job), staggered."""
    rng = random.Random(5)
    jobs = []
    for name, slot in stage.slots.items():
        for index in range(3):
            prompt = [rng.randrange(300) for _ in range(rng.randrange(1, 60))]
            job = pooled(f"{name}-{index}", prompt, slot, Pooling.HEAD, rng.randrange(4))
            jobs.append((name, job))
    return jobs


def score_errors(stage: HeadStage, jobs: Sequence[tuple[str, Job]]) -> dict[str, float]:
    """By feature, the largest difference of a logit from transformers'."""
    errors: dict[str, float] = {}
    for name, model in stage.tuned.items():
        own = [job for feature, job in jobs if feature == name]
        expected = logits_of(model, [job.request.prompt_ids for job in own])
        found = [job.samples[-1].pooled for job in own]
        assert all(len(logits or ()) == NUM_LABELS[name] for logits in found), name
        errors[name] = (torch.tensor(found) - torch.tensor(expected)).abs().max().item()
    return errors


def vector_errors(base: TinyBase, driver: Driver, folder: Path, chunk: int) -> dict[Pooling, float]:
    """Of an embedding adapter and the base, the largest difference from transformers' states."""
    is_odd = base.model.config.model_type in EXPERT_FAMILIES
    targets = ["q_proj", "o_proj"] if is_odd else ["q_proj", "v_proj"]
    fields = {"r": 4, "target_modules": targets, "task_type": "FEATURE_EXTRACTION"}
    tuned = save_random(embedder(base), folder, 1, **fields)
    driver.load(0, folder)
    rng = random.Random(7)
    prompts = [[rng.randrange(300) for _ in range(count)] for count in (1, 16, 45)]
    errors = dict.fromkeys((Pooling.LAST, Pooling.MEAN), 0.0)
    for model, slot in ((tuned, 0), (embedder(base), None)):
        jobs = [
            (prompt, pooling, pooled(f"{len(prompt)}-{pooling}", prompt, slot, pooling, 0))
            for prompt in prompts
            for pooling in errors
        ]
        driver.run([job for _, _, job in jobs], chunk=chunk)
        for prompt, pooling, job in jobs:
            states = states_of(model, prompt)
            parts = torch.tensor([sample.pooled for sample in job.samples if sample.pooled])
            assert pooling is Pooling.MEAN or len(parts) == 1
            expected = states[-1] if pooling is Pooling.LAST else states.mean(dim=0)
            found = parts[0] if pooling is Pooling.LAST else parts.sum(dim=0) / len(prompt)
            errors[pooling] = max(errors[pooling], (found - expected).abs().max().item())
    return errors
