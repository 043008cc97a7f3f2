"""vLLM's calls to load and unload adapters, where the operator opened a folder for them."""

from __future__ import annotations

import json
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
    status, said = _post(stack, "/v1/unload_lora_adapter", '{"lora_name": "uper"}')
    assert status == 404 and "did you mean default/upper?" in said
    assert json.loads(said)["error"]["param"] == "lora_name"


@pytest.mark.parametrize("path", ["../base", "/etc", "nothing", "upper/../../base"])
def test_only_folders_below_the_opened_one_are_read(stack: Stack, path: str) -> None:
    status, said = _post(
        stack, "/v1/load_lora_adapter", f'{{"lora_name": "x", "lora_path": "{path}"}}'
    )
    assert status == 404
    assert '"param": "lora_path"' in said


def _load(stack: Stack, path: str = "/v1/load_lora_adapter", **fields: object) -> tuple[int, str]:
    return _post(stack, path, json.dumps(fields))


def _versions(stack: Stack, name: str) -> list[int]:
    listed = stack.run_registry("list", name, "--json").stdout
    return sorted(json.loads(line)["version"] for line in listed.splitlines())


def test_a_name_is_replaced_only_in_place(stack: Stack) -> None:
    assert _load(stack, lora_name="Policy-A", lora_path="upper")[0] == 200
    for second in ("upper", "reverse"):
        status, said = _load(stack, lora_name="policy-a", lora_path=second, load_inplace=False)
        assert status == 400
        assert "already been loaded" in said
        assert "'load_inplace'" in said
    prompt = "zamihi 19="
    assert stack.complete("Policy-A", prompt)["choices"][0]["text"] == "ZAMIHI 19"
    assert _load(stack, lora_name="Policy-A", lora_path="reverse", load_inplace=True)[0] == 200
    assert stack.complete("Policy-A", prompt)["choices"][0]["text"] == "91 ihimaz"
    ids = [model["id"] for model in json.loads(stack.get("/v1/models?limit=1000")[1])["data"]]
    assert "Policy-A" in ids
    assert "policy-a" not in ids


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/skyrl/v1/load_lora_adapter"])
def test_calls_of_training_servers_replace_a_name_without_being_asked(
    stack: Stack, path: str
) -> None:
    name = "fixed" + path.count("/") * "x"
    assert _load(stack, path, lora_name=name, lora_path="upper")[0] == 200
    assert _load(stack, path, lora_name=name, lora_path="reverse")[0] == 200
    assert stack.complete(name, "zamihi 19=")["choices"][0]["text"] == "91 ihimaz"
    status, _ = _load(stack, path, lora_name=name, lora_path="upper", load_inplace=False)
    assert status == 400
    assert _post(stack, "/unload_lora_adapter", f'{{"lora_name": "{name}"}}')[0] == 200


def test_of_many_updates_the_newest_are_kept(stack: Stack) -> None:
    folders = ["upper", "reverse", "sort", "next", "mask", "vowels", "twice"]
    for folder in folders:
        assert _load(stack, "/load_lora_adapter", lora_name="rolling", lora_path=folder)[0] == 200
    eventually(lambda: _versions(stack, "rolling") == [4, 5, 6, 7], timeout_s=20.0)


def test_a_folder_that_was_never_uploaded_is_found_by_its_path(stack: Stack) -> None:
    for _ in range(2):
        answer = stack.complete("loras/Woof", "zamihi 19=")
        assert answer["model"] == "loras/Woof"
        assert answer["choices"][0]["text"] == "ZAMIHI 19"
    assert _versions(stack, "loras--Woof") == [1]


@pytest.mark.parametrize("model", ["nobody", "../base", "sub/../../base", "/etc", "a//b"])
def test_only_folders_with_an_adapter_are_found(stack: Stack, model: str) -> None:
    status, _ = stack.post("/v1/completions", {"model": model, "prompt": "a="})
    assert status in (400, 404)
