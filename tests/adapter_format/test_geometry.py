"""A base's geometry comes from its config and headers; what is missing or wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapter_format import geometry_from_folder
from loraplex.errors import InvalidAdapter, InvalidRequest
from tests.adapter_format.builders import Adapter, Tensor, tensor_file, tiny_geometry

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "hidden_size": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
TENSORS = {
    "model.embed_tokens.weight": Tensor("F16", (16, 8)),
    "model.layers.0.self_attn.q_proj.weight": Tensor("F16", (12, 8)),
    "model.layers.0.self_attn.q_proj.bias": Tensor("F16", (12,)),
    "model.norm.weight": Tensor("F16", (8,)),
    "lm_head.weight": Tensor("F16", (16, 8)),
}


def write(
    folder: Path, config: dict[str, object] = CONFIG, tensors: dict[str, Tensor] = TENSORS
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(tensor_file(tensors))
    return folder


def test_every_weight_becomes_a_module(tmp_path: Path) -> None:
    geometry = geometry_from_folder(write(tmp_path))
    assert [(m.name, m.kind, m.in_features, m.out_features) for m in geometry.modules] == [
        ("lm_head", "lm_head", 8, 16),
        ("model.embed_tokens", "embedding", 16, 8),
        ("model.layers.0.self_attn.q_proj", "linear", 8, 12),
        ("model.norm", "norm", 8, 8),
    ]
    assert [m.name for m in geometry.modules if m.has_bias] == ["model.layers.0.self_attn.q_proj"]
    assert (geometry.num_layers, geometry.vocab_size) == (1, 16)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_layers"])
def test_the_number_of_layers_is_read_by_the_key_of_any_family(key: str, tmp_path: Path) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "num_hidden_layers"}
    config[key] = 1
    assert geometry_from_folder(write(tmp_path, config)).num_layers == 1


@pytest.mark.parametrize(("model_type", "is_tied"), [("gemma2", True), ("llama", False)])
def test_a_config_without_the_key_ties_the_head_as_its_family_does_although_files_have_a_copy(
    model_type: str, is_tied: bool, tmp_path: Path
) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}
    geometry = geometry_from_folder(write(tmp_path, {**config, "model_type": model_type}))
    assert geometry.tied_embeddings == is_tied


def test_a_tied_head_is_a_module_without_a_tensor(tmp_path: Path) -> None:
    tensors = {name: t for name, t in TENSORS.items() if name != "lm_head.weight"}
    tied = geometry_from_folder(write(tmp_path, {**CONFIG, "tie_word_embeddings": True}, tensors))
    assert tied.tied_embeddings
    assert tied.modules[0].name == "lm_head" and tied.modules[0].out_features == 16
    assert not tied.modules[0].has_bias
    tensors["lm_head.bias"] = Tensor("F16", (16,))
    with_bias = geometry_from_folder(
        write(tmp_path, {**CONFIG, "tie_word_embeddings": True}, tensors)
    )
    assert with_bias.modules[0].has_bias


GPT2 = {
    "wte.weight": Tensor("F16", (16, 8)),
    "h.0.attn.c_attn.weight": Tensor("F16", (8, 24)),
    "h.0.attn.c_attn.bias": Tensor("F16", (24,)),
    "h.0.mlp.c_proj.weight": Tensor("F16", (32, 8)),
    "ln_f.weight": Tensor("F16", (8,)),
}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_is_named_as_in_its_model_and_its_linears_are_turned(
    prefix: str, tmp_path: Path
) -> None:
    """Its oldest files name the body's tensors without the body."""
    config: dict[str, object] = {"model_type": "gpt2", "n_layer": 1, "vocab_size": 16}
    tensors = {prefix + name: tensor for name, tensor in GPT2.items()}
    geometry = geometry_from_folder(write(tmp_path, config, tensors))
    assert [(m.name, m.kind, m.in_features, m.out_features) for m in geometry.modules] == [
        ("lm_head", "lm_head", 8, 16),
        ("transformer.h.0.attn.c_attn", "linear", 8, 24),
        ("transformer.h.0.mlp.c_proj", "linear", 32, 8),
        ("transformer.ln_f", "norm", 8, 8),
        ("transformer.wte", "embedding", 16, 8),
    ]
    assert (geometry.num_layers, geometry.tied_embeddings) == (1, True)


def test_what_only_copies_differ_in_leaves_the_fingerprint_alone(tmp_path: Path) -> None:
    first = geometry_from_folder(write(tmp_path / "a"))
    floats = {name: Tensor("F32", tensor.shape) for name, tensor in TENSORS.items()}
    config = {**CONFIG, "torch_dtype": "float32", "transformers_version": "9", "bos_token_id": 1}
    assert geometry_from_folder(write(tmp_path / "b", config, floats)) == first


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 1e6), ("rope_scaling", {"factor": 2}), ("rms_norm_eps", 1e-6)],
)
def test_what_changes_the_mathematics_changes_the_fingerprint(
    key: str, value: object, tmp_path: Path
) -> None:
    first = geometry_from_folder(write(tmp_path / "a"))
    second = geometry_from_folder(write(tmp_path / "b", {**CONFIG, key: value}))
    assert first.fingerprint != second.fingerprint
    assert first.modules == second.modules


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    whole = geometry_from_folder(write(tmp_path / "whole"))
    folder = write(tmp_path / "shards")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index, name in enumerate(TENSORS):
        shard = f"model-{index}.safetensors"
        (folder / shard).write_bytes(tensor_file({name: TENSORS[name]}))
        weight_map[name] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert geometry_from_folder(folder) == whole
    weight_map["model.other.weight"] = "model-0.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidRequest, match="the shards lack 1 tensor of"):
        geometry_from_folder(folder)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": None}, "config.json:model_type"),
        ({"model_type": ""}, "config.json:model_type"),
        ({"num_hidden_layers": "1"}, "config.json:num_hidden_layers"),
        ({"num_hidden_layers": 0}, "config.json:num_hidden_layers"),
        ({"quantization_config": {"bits": 4}}, "config.json:quantization_config"),
    ],
)
def test_a_wrong_config_is_named(changes: dict[str, object], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        geometry_from_folder(write(tmp_path, {**CONFIG, **changes}))
    assert caught.value.violations[0].field == field


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        geometry_from_folder(tmp_path)
    assert caught.value.violations[0].field == "config.json"
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest) as caught:
        geometry_from_folder(tmp_path)
    assert caught.value.violations[0].field == "model.safetensors"


def test_a_cut_off_weight_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidRequest) as caught:
        geometry_from_folder(tmp_path)
    assert caught.value.violations[0].field == "model.safetensors"
    assert "cut off" in caught.value.violations[0].description


def test_an_index_cannot_point_out_of_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path)
    index = {"weight_map": {"lm_head.weight": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequest, match="not a shard's name"):
        geometry_from_folder(folder)


def test_an_adapter_on_a_module_that_workers_cannot_adapt_is_refused_before_it_is_published() -> (
    None
):
    geometry = tiny_geometry()
    modules = (replace(m, is_fixed=m.name.startswith("model.layers.1.")) for m in geometry.modules)
    with pytest.raises(InvalidAdapter, match="workers cannot adapt") as caught:
        Adapter().validate(replace(geometry, modules=tuple(modules)))
    named = {violation.value for violation in caught.value.violations}
    assert named == {"model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"}
