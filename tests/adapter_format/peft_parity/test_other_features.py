"""Biases, whole weights, embeddings, heads and token rows: every tensor that PEFT writes for them
has its place in the report, and what is missing or unasked for is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from loraplex.adapter_format import (
    AdapterModule,
    Geometry,
    Report,
    TensorInfo,
    geometry_from_folder,
    read_folder,
    validate,
)
from loraplex.errors import InvalidAdapter
from tests.adapter_format.peft_parity import models

PREFIX = "base_model.model."
TARGETS = ["q_proj", "o_proj"]
FEATURES = {
    "bias-all": {"bias": "all"},
    "bias-lora-only": {"bias": "lora_only"},
    "lora-bias": {"lora_bias": True},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "saved-linear": {"modules_to_save": ["v_proj"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding-and-head-dora": {
        "target_modules": ["q_proj", "embed_tokens", "lm_head"],
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"embed_tokens": 2, "lm_head": 3},
    },
    "tokens": {"trainable_token_indices": [7, 3]},
}
FAMILIES = ("qwen2", "llama-tied-bias")


def write(family: str, feature: str, folder: Path) -> Geometry:
    """Save base and adapter of a family; returns the base's geometry."""
    base = models.save(family, folder)
    config = LoraConfig(**{"target_modules": TARGETS, **FEATURES[feature]})
    get_peft_model(models.build(family), config).save_pretrained(folder / "adapter")
    return geometry_from_folder(base)


def check(folder: Path, geometry: Geometry) -> Report:
    read = read_folder(folder / "adapter")
    return validate(
        read.config_bytes, read.header_prefix, read.tensor_file_size, read.files, geometry
    )


def tensors_of(module: AdapterModule) -> Iterator[TensorInfo]:
    for field in AdapterModule.__slots__:
        value = getattr(module, field)
        if isinstance(value, TensorInfo):
            yield value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_tensor_belongs_to_a_site(family: str, feature: str, tmp_path: Path) -> None:
    geometry = write(family, feature, tmp_path)
    report = check(tmp_path, geometry)
    placed = {info.name for module in report.modules for info in tensors_of(module)}
    assert sorted(placed) == sorted(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert report.warnings == ()


@pytest.mark.filterwarnings("ignore")
def test_trained_rows_keep_the_order_of_their_tokens(tmp_path: Path) -> None:
    report = check(tmp_path, write("qwen2", "tokens", tmp_path))
    (module,) = [module for module in report.modules if module.token_delta]
    assert module.name == "model.embed_tokens"
    assert module.token_ids == (7, 3)


@pytest.mark.filterwarnings("ignore")
def test_the_parts_of_an_embedding_and_a_head_are_told_apart(tmp_path: Path) -> None:
    report = check(tmp_path, write("qwen2", "embedding-and-head-dora", tmp_path))
    modules = {module.name: module for module in report.modules}
    embedding, head = modules["model.embed_tokens"], modules["lm_head"]
    assert (embedding.rank, head.rank) == (2, 3)
    assert embedding.embedding_a and embedding.embedding_a.shape == (2, 40)
    assert embedding.embedding_b and embedding.embedding_b.shape == (32, 2)
    assert embedding.magnitude and embedding.magnitude.shape == (32,)
    assert head.a and head.a.shape == (3, 32)
    assert head.magnitude and head.magnitude.shape == (40,)
    assert embedding.base_copy and head.base_copy
    assert embedding.scale == pytest.approx(8 / 2**0.5)


DAMAGE = {
    "saved": ("lm_head.weight", "model.embed_tokens.weight"),
    "tokens": ("model.embed_tokens.token_adapter.trainable_tokens_delta",),
    "embedding": ("model.embed_tokens.lora_embedding_B",),
    "lora-bias": ("model.layers.0.self_attn.q_proj.lora_B.bias",),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feature", DAMAGE)
def test_a_promised_tensor_that_is_missing_is_refused(feature: str, tmp_path: Path) -> None:
    geometry = write("qwen2", feature, tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    for name in DAMAGE[feature]:
        kept = {key: value for key, value in tensors.items() if key != PREFIX + name}
        save_file(kept, path)
        with pytest.raises(InvalidAdapter) as caught:
            check(tmp_path, geometry)
        module = name.split(".lora")[0].split(".token")[0].removesuffix(".weight")
        assert any(module in violation.field for violation in caught.value.violations)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feature", FEATURES)
def test_tensors_without_their_field_are_refused(feature: str, tmp_path: Path) -> None:
    geometry = write("qwen2", feature, tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(path.read_text())
    plain = {"target_modules": TARGETS, "use_dora": False, "bias": "none", "lora_bias": False}
    plain |= {"modules_to_save": None, "trainable_token_indices": None, "rank_pattern": {}}
    path.write_text(json.dumps({**fields, **plain}))
    if feature == "saved":
        norms = [f"{PREFIX}{m.name}.weight" for m in geometry.modules if m.kind == "norm"]
        expected = {f"adapter_model.safetensors:{name}" for name in norms}
    else:
        expected = set()
    with pytest.raises(InvalidAdapter) as caught:
        check(tmp_path, geometry)
    found = {violation.field for violation in caught.value.violations}
    assert found >= expected
    assert all(field.startswith("adapter_model.safetensors:") for field in found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", ["v_proj", "self_attn"])
def test_a_bias_that_peft_writes_three_times_is_read_once(saved: str, tmp_path: Path) -> None:
    """As one of all biases, and as a part of a saved module and of the module that it replaces."""
    geometry = geometry_from_folder(models.save("qwen2", tmp_path))
    config = LoraConfig(target_modules=["up_proj"], bias="all", modules_to_save=[saved])
    get_peft_model(models.build("qwen2"), config).save_pretrained(tmp_path / "adapter")
    report = check(tmp_path, geometry)
    read = {info.name for module in report.modules for info in tensors_of(module)}
    written = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    copies = written - read
    assert copies
    assert all(".modules_to_save." in name or ".original_module." in name for name in copies)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bias": "lora_only"}))
    with pytest.raises(InvalidAdapter) as caught:
        check(tmp_path, geometry)
    refused = [v.field for v in caught.value.violations if "which PEFT adds" in v.description]
    assert {field.partition(":")[2] for field in refused} == copies


@pytest.mark.filterwarnings("ignore")
def test_biases_that_were_trained_but_not_saved_are_noted(tmp_path: Path) -> None:
    geometry = write("qwen2", "bias-lora-only", tmp_path)
    assert not check(tmp_path, geometry).warnings
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if not name.endswith(".bias")}, path)
    (warning,) = check(tmp_path, geometry).warnings
    assert warning.field == "adapter_config.json:bias"


@pytest.mark.filterwarnings("ignore")
def test_a_bias_that_newer_versions_ignore_is_refused_with_the_way_to_use_it(
    tmp_path: Path,
) -> None:
    geometry = write("qwen2", "bias-lora-only", tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name.replace(".base_layer.bias", ".bias"): t for name, t in tensors.items()}, path)
    with pytest.raises(InvalidAdapter, match='set bias to "all"'):
        check(tmp_path, geometry)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bias": "all"}))
    assert [m.name for m in check(tmp_path, geometry).modules if m.bias]
