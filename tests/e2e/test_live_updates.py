"""Adapters from memory, updates under load, and logprobs that a trainer can use."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, NoBadWordsLogitsProcessor

from benchmarks.serving.live_updates import PROMPT, drive
from loraplex import BlockingRegistry, Publication
from loraplex.errors import AdapterNotFound, InvalidAdapter
from tests.e2e.stack import DEMO, Stack, eventually

TEXT = bytes(PROMPT).decode()
UPPER, REVERSED = "ZAMIHI 19", "91 ihimaz"


def _adapter(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = DEMO / "adapters" / name
    config = json.loads((folder / "adapter_config.json").read_bytes())
    return load_file(folder / "adapter_model.safetensors"), config


def test_an_adapter_from_memory_has_the_digest_of_its_folder(stack: Stack) -> None:
    state_dict, config = _adapter("upper")
    with BlockingRegistry(stack.registry) as registry:
        from_files = registry.get("upper").version
        published = registry.publish(state_dict, config, Publication("From-Memory"))
    assert published.version.digest == from_files.digest
    assert published.version.name == "From-Memory"
    assert stack.complete("from-memory", TEXT)["choices"][0]["text"] == UPPER


def test_an_adapter_from_memory_is_checked_like_a_folder(stack: Stack) -> None:
    state_dict, config = _adapter("upper")
    with BlockingRegistry(stack.registry) as registry:
        with pytest.raises(InvalidAdapter):
            registry.publish(state_dict, {**config, "r": 3}, Publication("wrong"))
        name = next(iter(state_dict))
        damaged = {**state_dict, name: state_dict[name] * float("nan")}
        with pytest.raises(InvalidAdapter):
            registry.publish(damaged, config, Publication("wrong"))
        with pytest.raises(AdapterNotFound):
            registry.get("wrong")


def test_an_ephemeral_adapter_serves_and_goes(stack: Stack) -> None:
    state_dict, config = _adapter("reverse")
    with BlockingRegistry(stack.registry) as registry:
        version = registry.publish(state_dict, config, Publication("one-off", ttl_s=4.0)).version
        assert version.expires_unix_s == pytest.approx(version.created_unix_s + 4.0)
        assert stack.complete("one-off", TEXT)["choices"][0]["text"] == REVERSED

        def is_gone() -> bool:
            return not list(registry.list(name="one-off"))

        eventually(is_gone, timeout_s=20.0)
    eventually(
        lambda: stack.post("/v1/completions", {"model": "one-off", "prompt": "a="})[0] == 404, 10.0
    )


def test_each_token_of_every_answer_names_its_weights_under_updates(stack: Stack) -> None:
    tally = asyncio.run(drive(stack.grpc, stack.registry, updates=12, clients=4, others=1))
    assert (tally.updates, tally.failed, tally.mislabelled) == (12, 0, 0)
    assert tally.tokens == tally.bit_equal > 0
    assert tally.switched > 0
    assert tally.controls_told_apart == tally.controls > 0


@pytest.mark.long
def test_a_thousand_updates_leave_no_token_mislabelled_and_no_request_failed(stack: Stack) -> None:
    tally = asyncio.run(drive(stack.grpc, stack.registry, updates=1000, clients=4, others=1))
    assert (tally.updates, tally.failed, tally.mislabelled) == (1000, 0, 0)
    assert tally.tokens == tally.bit_equal


@pytest.mark.parametrize("name", ["upper", "sort"])
def test_logprobs_are_those_of_peft(stack: Stack, name: str) -> None:
    """Of sampled tokens at any temperature and of the prompt, teacher-forced in float32."""
    sampled = {"temperature": 0.8, "top_k": 40, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    fields = {"logprobs": True, "prompt_logprobs": 0, "return_token_ids": True, **sampled}
    choice = stack.complete(name, list(PROMPT), **fields)["choices"][0]
    ids = [*PROMPT, *choice["token_ids"]]
    rows = _peft_logprobs(name, ids)
    expected = [float(rows[i, token_id]) for i, token_id in enumerate(ids[1:])]
    prompt = [next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]]
    given = [*prompt, *choice["logprobs"]["token_logprobs"]]
    assert len(given) == len(ids) - 1
    assert max(abs(a - b) for a, b in zip(given, expected, strict=True)) <= 1e-4


def test_listed_tokens_have_the_logprobs_of_peft(stack: Stack) -> None:
    labels = [ord(letter) for letter in "zB7"]
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    shown = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body = stack.complete("upper", list(PROMPT), logprob_token_ids=labels, **fields, **shown)
    choice = body["choices"][0]
    rows = _peft_logprobs("upper", [*PROMPT, *choice["token_ids"]])[len(PROMPT) - 1 :]
    for row, token_id, top in zip(
        rows, choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True
    ):
        assert list(top)[:3] == [f"token_id:{label}" for label in labels]
        assert top.keys() == {f"token_id:{each}" for each in (*labels, token_id)}
        assert all(abs(top[f"token_id:{each}"] - float(row[each])) <= 1e-4 for each in labels)


def test_bad_words_are_left_out_as_transformers_leaves_them_out(stack: Stack) -> None:
    """The processor sees the output alone, as in vLLM: transformers shows it the prompt, too."""
    words = ["AMI", "Z"]
    sequences = [list((space + word).encode()) for word in words for space in ("", " ")]
    forbid, ids = NoBadWordsLogitsProcessor(sequences), list[int]()
    for _ in range(8):
        logprobs = _peft_logprobs("upper", [*PROMPT, *ids, 0])[-1:]
        ids.append(int(forbid(torch.tensor([ids], dtype=torch.int64), logprobs).argmax()))
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    (choice,) = stack.complete("upper", list(PROMPT), bad_words=words, **fields)["choices"]
    assert choice["token_ids"] == ids
    assert choice["text"] != UPPER[:8] and not any(word in choice["text"] for word in words)


def _peft_logprobs(name: str, ids: list[int]) -> torch.Tensor:
    """Log-softmax rows of the tokens after each of `ids` but the last."""
    with torch.no_grad():
        logits = _peft_model(name)(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1)


@cache
def _peft_model(name: str) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(base, DEMO / "adapters" / name).eval()
