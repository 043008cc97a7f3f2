"""An adapter in memory becomes the very bytes that PEFT saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapter_format import parse_header
from loraplex.client.memory_adapter import header_of, memory_files
from loraplex.errors import InvalidAdapter, InvalidRequest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    targets = {"q_proj", "v_proj", "down_proj"}
    lora = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def test_the_tensor_file_is_byte_for_byte_the_one_that_peft_saves(
    model: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    state_dict = peft.get_peft_model_state_dict(model)
    config, tensors = memory_files(state_dict, model.peft_config["default"])
    assert tensors.content == (tmp_path / "adapter_model.safetensors").read_bytes()
    saved = json.loads((tmp_path / "adapter_config.json").read_bytes())
    written = json.loads(config.content)
    # PEFT writes what is not at its default in training, too: the fields that decide decoding.
    for name in ("r", "lora_alpha", "peft_type", "task_type", "use_dora", "bias"):
        assert written[name] == saved[name]
    assert sorted(written["target_modules"]) == sorted(saved["target_modules"])


def test_the_header_is_what_a_check_needs(model: Any) -> None:
    _, tensors = memory_files(peft.get_peft_model_state_dict(model), {})
    header = parse_header(header_of(tensors), tensors.size_bytes)
    assert len(header.tensors) == len(peft.get_peft_model_state_dict(model))


def test_tensors_of_any_layout_are_saved_as_dense_ones() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    shared = {"a": matrix.t(), "b": matrix, "c": matrix[:, 1:3]}
    _, tensors = memory_files(shared, {})
    _, dense = memory_files({name: each.clone() for name, each in shared.items()}, {})
    assert tensors.content == dense.content


@pytest.mark.parametrize(
    ("state_dict", "config", "error"),
    [
        ({}, {}, InvalidAdapter),
        ({"a": [1.0]}, {}, InvalidRequest),
        ({"a": torch.zeros(1)}, "r=4", InvalidRequest),
        ({"a": torch.zeros(1)}, {"r": object()}, InvalidRequest),
    ],
    ids=["no tensors", "a list", "a config of text", "a config that JSON lacks"],
)
def test_what_is_no_adapter_is_refused(state_dict: Any, config: Any, error: type) -> None:
    with pytest.raises(error):
        memory_files(state_dict, config)
