"""An adapter with tokens and a chat template of its own, text in and text out, against PEFT."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.stack import BASE, BASE_ID, Stack

NAME = "own-words"
TOKENS = ("<plus>", "<turn>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message.role }}:{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)
NUM_NEW_TOKENS = 24
MESSAGES = [{"role": "user", "content": "one<plus>two"}]
PROMPT = "3<plus>4 = <turn> é"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As PEFT and transformers save it; rows of the new tokens are trained, and drawn often."""
    made = tmp_path_factory.mktemp("adapter") / NAME
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    new = [AddedToken(token, normalized=False) for token in TOKENS]
    assert tokenizer.add_tokens(new) == len(TOKENS)
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.convert_tokens_to_ids(list(TOKENS))
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        trainable_token_indices=ids,
    )
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "trainable_tokens_delta" in name:
                weight.normal_(std=1.0)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    (made / "README.md").unlink(missing_ok=True)
    return made


@pytest.fixture(scope="module")
def published(stack: Stack, folder: Path) -> None:
    stack.publish(folder, name=NAME)


@cache
def reference(folder: Path) -> tuple[Any, Any]:
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder).eval(), AutoTokenizer.from_pretrained(folder)


def greedy(folder: Path, ids: list[int]) -> tuple[list[int], str]:
    """New ids, and their text, special tokens left out."""
    model, tokenizer = reference(folder)
    prompt = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
        )
    new = [int(token) for token in out[0, len(ids) :]]
    return new, tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.usefixtures("published")
def test_text_in_and_out_equals_transformers_and_peft(stack: Stack, folder: Path) -> None:
    ids = reference(folder)[1](PROMPT)["input_ids"]
    new, text = greedy(folder, ids)
    answer = stack.complete(NAME, PROMPT, max_tokens=NUM_NEW_TOKENS, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == new
    assert choice["text"] == text
    assert any(token in text for token in TOKENS), "the new tokens are drawn, too"


@pytest.mark.usefixtures("published")
def test_chat_uses_the_adapter_s_template(stack: Stack, folder: Path) -> None:
    ids = list(
        reference(folder)[1].apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    )
    _, text = greedy(folder, ids)
    body = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_NEW_TOKENS}
    status, answer = stack.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["prompt_tokens"] == len(ids)
    status, answer = stack.post("/tokenize", {"model": NAME, "messages": MESSAGES})
    assert (status, answer["tokens"]) == (200, ids)
    status, answer = stack.post("/detokenize", {"model": NAME, "tokens": ids})
    assert status == 200, answer
    assert answer["prompt"] == reference(folder)[1].decode(ids)


@pytest.mark.usefixtures("published")
def test_stop_strings_and_logprobs_know_the_new_tokens(stack: Stack, folder: Path) -> None:
    ids = reference(folder)[1](PROMPT)["input_ids"]
    _, text = greedy(folder, ids)
    stop = next(token for token in reversed(TOKENS) if token in text)
    answer = stack.complete(NAME, PROMPT, max_tokens=NUM_NEW_TOKENS, stop=[stop], logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text.partition(stop)[0], "stop")
    answer = stack.complete(NAME, PROMPT, max_tokens=NUM_NEW_TOKENS, logprobs=1)
    assert stop in answer["choices"][0]["logprobs"]["tokens"]


@pytest.mark.usefixtures("published")
def test_the_base_keeps_its_own_tokens(stack: Stack) -> None:
    base_ids = AutoTokenizer.from_pretrained(BASE)(PROMPT)["input_ids"]
    answer = stack.complete(BASE_ID, PROMPT, max_tokens=1, return_token_ids=True, ignore_eos=True)
    assert answer["choices"][0]["prompt_token_ids"] == base_ids
