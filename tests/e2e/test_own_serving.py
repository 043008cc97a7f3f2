"""Adapters with a rotary embedding, an end, or tokens of their own, through the whole stack."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.e2e.stack import BASE, BASE_ID, Stack

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONTEXT = AutoConfig.from_pretrained(BASE).max_position_embeddings
NUM_NEW_TOKENS = 24
WORDS = ('{"size": ', "small", "large")


def made_adapter(folder: Path, **fields: Any) -> Path:
    """A random adapter as PEFT saves it."""
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **fields)
    config.init_lora_weights = False
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "trainable_tokens_delta" in name:
                weight.normal_()
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def expected(folder: Path, prompt: list[int], rope: dict[str, Any] | None) -> list[int]:
    """Greedy new tokens of transformers and PEFT, one by one from the whole text."""
    config = AutoConfig.from_pretrained(BASE)
    if rope is not None:
        config.rope_parameters = {**config.rope_parameters, **rope}
    base = AutoModelForCausalLM.from_pretrained(BASE, config=config, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def complete(stack: Stack, model: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = stack.complete(model, prompt, return_token_ids=True, **fields)
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def test_a_label_gives_an_adapter_its_own_rope_and_context(stack: Stack, tmp_path: Path) -> None:
    folder = made_adapter(tmp_path / "long")
    label = f"rope_scaling={json.dumps({**YARN, 'max_position_embeddings': CONTEXT + 64})}"
    stack.run_registry("upload", str(folder), "--name", "long", "--label", label)
    stack.publish(folder, name="short")
    shown = json.loads(stack.run_registry("show", "long", "--json").stdout)
    assert json.loads(shown["rope_scaling"])["factor"] == 4
    prompt = [256, *b"the cat sat on the mat and looked at the dog that sat on the log=" * 2]
    own, plain = expected(folder, prompt, YARN), expected(folder, prompt, None)
    assert own != plain
    fields = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    assert complete(stack, "long", prompt, **fields)["token_ids"] == own
    assert complete(stack, "short", prompt, **fields)["token_ids"] == plain
    longer = (prompt * (CONTEXT // len(prompt) + 1))[: CONTEXT + 4]
    assert len(complete(stack, "long", longer, max_tokens=60, ignore_eos=True)["token_ids"]) == 60
    for model, most in (("long", 61), ("short", 1)):
        body = {"model": model, "prompt": longer, "max_tokens": most}
        status, answer = stack.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
    status, answer = stack.post("/tokenize", {"model": "long", "prompt": "a"})
    assert (status, answer["max_model_len"]) == (200, CONTEXT + 64)


def test_its_generation_config_says_where_its_output_ends(stack: Stack, tmp_path: Path) -> None:
    folder = made_adapter(tmp_path / "ends")
    prompt = [256, *b"hello="]
    tokens = expected(folder, prompt, None)
    own_eos = next(token for token in tokens[3:] if token not in tokens[:3])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [own_eos]}))
    stack.publish(folder, name="ends")
    shown = stack.run_registry("show", "ends").stdout
    assert re.search(rf"^EOS ids +{own_eos}$", shown, re.MULTILINE), shown
    ended = complete(stack, "ends", prompt, max_tokens=NUM_NEW_TOKENS)
    assert ended["token_ids"] == tokens[: tokens.index(own_eos) + 1]
    assert ended["finish_reason"] == "stop"
    on = complete(stack, "ends", prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    assert on["token_ids"] == tokens
    later = complete(stack, "ends", prompt, max_tokens=NUM_NEW_TOKENS, min_tokens=12)
    assert own_eos not in later["token_ids"][:12]
    guided = complete(stack, "ends", prompt, guided_regex="[a-c]{2,9}", temperature=1, seed=3)
    assert re.fullmatch("[a-c]{2,9}", guided["text"])
    assert guided["finish_reason"] == "stop" and guided["token_ids"][-1] in (own_eos, *b"abc")


@pytest.fixture(scope="module")
def wordy(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Publishes an adapter with words as tokens; their ids."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(WORDS))
    folder = made_adapter(tmp_path_factory.mktemp("wordy") / "wordy", trainable_token_indices=ids)
    tokenizer.save_pretrained(folder)
    stack.publish(folder, name="wordy")
    return ids


def test_grammars_use_the_tokens_that_an_adapter_adds(stack: Stack, wordy: list[int]) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "n": {"type": "integer"}},
        "required": ["size", "n"],
        "additionalProperties": False,
    }
    bias = {str(token_id): 30 for token_id in wordy}
    drawn = set()
    for seed in range(4):
        fields = {"seed": seed, "temperature": 1.0, "max_tokens": 200, "logit_bias": bias}
        choice = complete(stack, "wordy", "hello=", guided_json=schema, **fields)
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["text"])["size"] in ("small", "large")
        drawn |= {*choice["token_ids"]} & {*wordy}
    assert wordy[0] in drawn and drawn & {*wordy[1:]}
    base = complete(stack, BASE_ID, "hello=", guided_json=schema, max_tokens=200, temperature=1)
    assert set(base["token_ids"]).isdisjoint(wordy)
