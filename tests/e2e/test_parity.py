"""The crown: mixed batch == alone == merged weights == transformers + peft, token for token.

Trained adapters, float32, greedy: plain identity, no tolerance.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, BASE, BASE_ID, Stack

MAX_TOKENS = 24
PROMPTS_EACH = 3


@cache
def prompts(name: str) -> tuple[tuple[int, ...], ...]:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    return tuple(
        tuple(tokenizer(text)["input_ids"]) for text, _ in held_out(name, PROMPTS_EACH, 31)
    )


def generate(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """Greedy tokens of transformers, EOS included."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def load_base() -> Any:
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()


def ask(stack: Stack, job: tuple[str, tuple[int, ...]]) -> list[int]:
    name, prompt = job
    answer = stack.complete(name, list(prompt), max_tokens=MAX_TOKENS, return_token_ids=True)
    return [int(token) for token in answer["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def mixed(stack: Stack) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """All adapters and the base, all prompts, all at once."""
    names = [path.name for path in ADAPTERS] + [BASE_ID]
    jobs = [
        (name, prompt)
        for index in range(PROMPTS_EACH)
        for name in names
        for prompt in [prompts(name if name != BASE_ID else ADAPTERS[0].name)[index]]
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return dict(zip(jobs, pool.map(lambda job: ask(stack, job), jobs), strict=True))


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_mixed_alone_merged_and_peft_agree(
    stack: Stack, mixed: dict[tuple[str, tuple[int, ...]], list[int]], folder: Path
) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        peft = PeftModel.from_pretrained(load_base(), folder).float().eval()
        theirs = [generate(peft, prompt) for prompt in prompts(folder.name)]
        merged_model = peft.merge_and_unload()
        merged = [generate(merged_model, prompt) for prompt in prompts(folder.name)]
    batched = [mixed[folder.name, prompt] for prompt in prompts(folder.name)]
    alone = [ask(stack, (folder.name, prompt)) for prompt in prompts(folder.name)]
    assert batched == alone == merged == theirs


def test_the_base_in_the_mixed_batch_equals_transformers(
    mixed: dict[tuple[str, tuple[int, ...]], list[int]],
) -> None:
    base = load_base()
    with torch.inference_mode():
        for prompt in prompts(ADAPTERS[0].name):
            assert mixed[BASE_ID, prompt] == generate(base, prompt)
