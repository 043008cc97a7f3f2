"""A config.json of a random base that lacks keys means what transformers makes of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from loraplex.errors import LoraplexError
from loraplex_services.worker.model.config_reader import HARMLESS_KEYS
from tests.worker.parity.bases import set_swiglu_limit
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.runners import parity_runner
from tests.worker.parity.suite import MAX_LOGPROB_ERROR
from tests.worker.parity.unusual import unusual_base

DAILY = (1, 4, 8, 165)
SEEDS = (*range(40), *range(160, 180))
NUM_LEFT_OUT = 6
NUM_NEW_TOKENS = 6
NEEDED = {
    "architectures", "dtype", "hidden_size", "intermediate_size", "model_type",
    "num_attention_heads", "num_hidden_layers", "vocab_size",
}  # fmt: skip


def read(folder: Path) -> transformers.PreTrainedModel | None:
    """The base as transformers reads it; None if it fails or makes up weights."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = config._experts_implementation = "eager"
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True
        )
        model(torch.tensor([[1, 2, 3]]))
    except Exception:  # whatever its many classes raise
        return None
    set_swiglu_limit(model)
    return None if any(found.values()) else model.eval()


def leave_out(folder: Path, rng: random.Random) -> list[str]:
    """Remove keys that transformers can do without; returns them."""
    file = folder / "config.json"
    fields: dict[str, Any] = json.loads(file.read_text())
    removed: list[str] = []
    candidates = sorted(fields.keys() - NEEDED - HARMLESS_KEYS)
    for key in rng.sample(candidates, len(candidates)):
        file.write_text(json.dumps({k: v for k, v in fields.items() if k != key}))
        if len(removed) < NUM_LEFT_OUT and read(folder) is not None:
            removed.append(key)
            del fields[key]
    file.write_text(json.dumps(fields))
    return removed


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.long] * (s not in DAILY)) for s in SEEDS]
)
@torch.inference_mode()
def test_a_base_without_some_keys_is_that_of_transformers_or_refused(
    seed: int, tmp_path: Path
) -> None:
    base = unusual_base(seed, tmp_path)
    rng = random.Random(seed)
    removed = leave_out(tmp_path, rng)
    model = read(tmp_path)
    assert removed and model is not None
    try:
        driver = Driver(parity_runner(tmp_path, arena_bytes=16 << 20))
    except LoraplexError as error:
        assert error.violations, removed
        return
    prompt = [rng.randrange(base.config.vocab_size) for _ in range(45)]
    job = Job(greedy("r", prompt, NUM_NEW_TOKENS, logprobs=0))
    (ours,) = driver.run([job], chunk=17)
    rows = model(torch.tensor([prompt + ours])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    found = [s.logprobs.logprob for s in job.samples if s.logprobs is not None]
    expected = rows.gather(1, torch.tensor(ours)[:, None])[:, 0]
    error = (torch.tensor(found) - expected).abs().max().item()
    assert error < MAX_LOGPROB_ERROR, f"{base.name} without {removed}"
