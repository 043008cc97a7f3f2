"""A stack with vLLM's flags for the context, the memory and the dtype of adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from tests.e2e.stack import ADAPTERS, BASE_ID, Stack, start

CONTEXT = 48


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ["--max-model-len", str(CONTEXT), "--lora-dtype", "bfloat16", "--dtype", "float32"]
    folder = tmp_path_factory.mktemp("capped")
    running = start(folder / "state", *flags, "--kv-memory", "1%")
    try:
        running.publish(ADAPTERS[0])
        long = folder / "long"
        shutil.copytree(ADAPTERS[0], long)
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        running.run_registry(
            *("upload", str(long), "--name", "long"),
            *("--label", f"rope_scaling={json.dumps(rope)}"),
        )
        yield running
    finally:
        assert running.stop() == 0


def test_the_context_is_shown_and_kept(capped: Stack) -> None:
    models = json.loads(capped.get("/v1/models")[1])["data"]
    assert models[0]["id"] == BASE_ID and models[0]["max_model_len"] == CONTEXT
    for model in (BASE_ID, ADAPTERS[0].name, "long"):
        prompt = [5] * (CONTEXT - 8)
        assert capped.complete(model, prompt, max_tokens=8)["usage"]["prompt_tokens"] == CONTEXT - 8
        body = {"model": model, "prompt": prompt, "max_tokens": 9}
        status, answer = capped.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
        assert str(CONTEXT) in answer["error"]["message"]


def test_a_chat_without_max_tokens_ends_at_the_context(capped: Stack) -> None:
    for model in (BASE_ID, "long"):
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "abc="}],
            "ignore_eos": True,
            "temperature": 0,
        }
        status, answer = capped.post("/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"
