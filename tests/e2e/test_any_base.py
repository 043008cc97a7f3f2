"""Bases of every family and adapters of every kind through the whole stack, against PEFT.

The worker's parity suite drives the model; this drives `registry upload` and HTTP, so that a field
lost by validation, the index, the gateway or the loader shows, too.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.e2e import stack as stacks
from tests.e2e.stack import BASE_ID, Stack
from tests.worker.parity.adapters import (
    FEATURES,
    LIBRARY_FEATURES,
    RESIZED,
    features_of,
    make_adapter,
)
from tests.worker.parity.bases import BASES, LIBRARY_BASES, make_base
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference

pytestmark = pytest.mark.long

NUM_NEW_TOKENS = 48
PROMPTS_EACH = 3


def save_tokenizer(folder: Path) -> None:
    """One token for each byte; the ids above have no text."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def ask(stack: Stack, job: tuple[str | None, list[int]]) -> list[int]:
    name, prompt = job
    fields = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
    answer = stack.complete(name or BASE_ID, prompt, **fields)
    return [int(token) for token in answer["choices"][0]["token_ids"]]


def prompt_for(name: str | None, rng: random.Random) -> list[int]:
    """Ids that the adapter has; an activated one is invoked in most prompts."""
    num_tokens = RESIZED.get(name or "", 300)
    prompt = [rng.randrange(num_tokens) for _ in range(rng.randrange(1, 90))]
    if name == "activated":
        index = rng.randrange(len(prompt))
        prompt[index : index + 3] = FEATURES[name]["alora_invocation_tokens"]
    return prompt


@pytest.mark.parametrize("base_name", [*BASES, "granite", "cohere2"])
def test_every_adapter_of_a_base_answers_as_peft_does(base_name: str, tmp_path: Path) -> None:
    base = make_base(base_name, tmp_path / "base")
    save_tokenizer(base.folder)
    features = features_of(base)
    if base_name in LIBRARY_BASES:
        features = [name for name in features if name in LIBRARY_FEATURES]
    adapters = {name: make_adapter(base, name, tmp_path / name) for name in features}
    reference = Reference(base, adapters)
    rng = random.Random(base_name)
    names: list[str | None] = [*adapters, None] * PROMPTS_EACH
    rng.shuffle(names)
    jobs = [(name, prompt_for(name, rng)) for name in names]
    stack = stacks.start(tmp_path / "state", "--dtype", "float32", model=base.folder)
    try:
        for name, folder in adapters.items():
            stack.publish(folder, name=name)
        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(pool.map(lambda job: ask(stack, job), jobs))
    finally:
        assert stack.stop() == 0
    verdict = Verdict()
    for (name, prompt), ours in zip(jobs, answers, strict=True):
        assert len(ours) == NUM_NEW_TOKENS
        tokens = prompt + ours
        verdict.judge(
            len(prompt),
            ours,
            reference.logits(name, tokens, len(prompt)),
            partial(reference.logits64, name, tokens, len(prompt)),
            f"{base_name} {name}",
        )
    verdict.finish()
