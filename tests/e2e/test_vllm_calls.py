"""vLLM's calls to load and unload adapters, where the operator opened a folder for them."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from tests.e2e.stack import Stack, eventually


def _post(stack: Stack, path: str, body: str) -> tuple[int, str]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(stack.http + path, body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_loaded_adapter_answers_at_once_and_an_unloaded_one_is_gone_soon(stack: Stack) -> None:
    body = '{"lora_name": "louder", "lora_path": "upper"}'
    status, said = _post(stack, "/v1/load_lora_adapter", body)
    assert (status, said) == (200, "Success: LoRA adapter 'louder' added successfully.")
    assert stack.complete("louder", "zamihi 19=")["choices"][0]["text"] == "ZAMIHI 19"
    status, said = _post(stack, "/v1/unload_lora_adapter", '{"lora_name": "louder"}')
    assert (status, said) == (200, "Success: LoRA adapter 'louder' removed successfully.")

    def is_gone() -> bool:
        return stack.post("/v1/completions", {"model": "louder", "prompt": "a="})[0] == 404

    eventually(is_gone, timeout_s=10.0)


def test_adapters_published_otherwise_cannot_be_unloaded(stack: Stack) -> None:
    status, said = _post(stack, "/v1/unload_lora_adapter", '{"lora_name": "upper"}')
    assert status == 403
    assert "registry delete" in said
    status, _ = _post(stack, "/v1/unload_lora_adapter", '{"lora_name": "nobody"}')
    assert status == 404


@pytest.mark.parametrize("path", ["../base", "/etc", "nothing", "", "upper/../../base"])
def test_only_folders_below_the_opened_one_are_read(stack: Stack, path: str) -> None:
    status, said = _post(
        stack, "/v1/load_lora_adapter", f'{{"lora_name": "x", "lora_path": "{path}"}}'
    )
    assert status == 404
    assert '"param": "lora_path"' in said
