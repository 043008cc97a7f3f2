"""Cached prefixes from the outside: counted in usage, and never seen in the tokens."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from demo.skills import held_out
from tests.e2e.stack import ADAPTERS, BASE, BASE_ID, Stack

NUM_TURNS = 3


def ask(stack: Stack, model: str, prompt: list[int], salt: str) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt were cached."""
    answer: dict[str, Any] = stack.complete(
        model, prompt, max_tokens=24, ignore_eos=True, cache_salt=salt, return_token_ids=True
    )
    usage = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], usage["cached_tokens"]


def make_turns() -> list[list[int]]:
    """Questions of one talk, each in token ids."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    texts = [text for text, _ in held_out(ADAPTERS[0].name, NUM_TURNS, 47)]
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("model", [*(path.name for path in ADAPTERS[:4]), BASE_ID])
def test_a_talk_over_a_warm_cache_has_the_tokens_of_cold_ones(stack: Stack, model: str) -> None:
    prompt: list[int] = []
    for number, turn in enumerate(make_turns()):
        prompt = prompt + turn
        warm, num_cached = ask(stack, model, prompt, "talk")
        cold, none = ask(stack, model, prompt, f"turn {number}")
        assert warm == cold and none == 0
        if number:
            num_computed = len(prompt) - len(turn) - 1
            assert num_cached == num_computed // 16 * 16, "every full block of the turn before"
        prompt = prompt + warm
