"""Bad input gets a status and a message that names the field; the stack keeps serving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import ADAPTERS, BASE_ID, Stack

NAME = ADAPTERS[0].name if ADAPTERS else ""


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nobody/nothing"}, 404, "model"),
        ({"model": "Upper Case"}, 400, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": [3] * 100_000}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"no_such_field": 1}, 400, "no_such_field"),
    ],
)
def test_bad_fields_are_named(
    stack: Stack, fields: dict[str, Any], status: int, param: str
) -> None:
    body = {"model": NAME, "prompt": "a=", "max_tokens": 4, **fields}
    got, answer = stack.post("/v1/completions", body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    if isinstance(fields.get("prompt"), list) and len(fields["prompt"]) > 1000:
        assert error["param"] in {"prompt", "max_tokens"}
    else:
        assert error["param"] == param, error
    assert stack.complete(NAME, "a=")["choices"]


def test_malformed_json_and_wrong_content_type_are_400(stack: Stack) -> None:
    assert stack.post("/v1/completions", b"{")[0] == 400
    plain = {"content-type": "text/plain"}
    assert stack.post("/v1/completions", b"{}", plain)[0] in {400, 415}


def copy_adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ADAPTERS[0], tmp_path / "adapter"))


def refuse(stack: Stack, folder: Path) -> dict[str, Any]:
    """Upload must be refused with exit code 3 and leave nothing behind."""
    before = stack.run_registry("list", "--json").stdout
    done = stack.run_registry("upload", str(folder), "--name", "broken", "--json", check=False)
    assert done.returncode == 3, (done.returncode, done.stderr)
    assert stack.run_registry("list", "--json").stdout == before
    error: dict[str, Any] = json.loads(done.stderr)["error"]
    assert error["violations"], error
    return error


def test_truncated_safetensors_are_refused(stack: Stack, tmp_path: Path) -> None:
    folder = copy_adapter(tmp_path)
    tensors = folder / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    error = refuse(stack, folder)
    assert "adapter_model.safetensors" in error["violations"][0]["field"]


def test_pickle_files_are_refused(stack: Stack, tmp_path: Path) -> None:
    folder = copy_adapter(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "adapter_model.bin" in json.dumps(refuse(stack, folder))


@pytest.mark.parametrize(
    ("field", "value"),
    [("peft_type", "LOHA"), ("layer_replication", [[0, 2]])],
)
def test_configs_that_cannot_be_served_are_refused_by_field(
    stack: Stack, tmp_path: Path, field: str, value: Any
) -> None:
    folder = copy_adapter(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    fields = [violation["field"] for violation in refuse(stack, folder)["violations"]]
    assert any(name.endswith(field) for name in fields), fields


def test_an_adapter_of_another_base_is_refused_by_shape(stack: Stack, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_adapter(tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    wider = {
        key: value.repeat(1, 2) if "lora_A" in key else value for key, value in tensors.items()
    }
    save_file(wider, path)
    assert "lora_A" in json.dumps(refuse(stack, folder)["violations"])


def test_the_base_cannot_be_taken_as_an_adapter_name(stack: Stack) -> None:
    done = stack.run_registry("upload", str(ADAPTERS[0]), "--name", BASE_ID, check=False)
    assert done.returncode != 0
