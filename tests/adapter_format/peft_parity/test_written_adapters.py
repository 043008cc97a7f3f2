"""Adapters that PEFT itself wrote are described as PEFT loads them, or refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from loraplex.adapter_format import (
    Geometry,
    Report,
    core_manifest,
    digest_of,
    geometry_from_folder,
    parse_manifest,
    read_folder,
    validate,
)
from loraplex.errors import InvalidAdapter
from tests.adapter_format.peft_parity import models

ATTENTION = {"phi3": ["qkv_proj", "o_proj"]}
MLP = {"phi3": ["gate_up_proj", "down_proj"]}

SERVED = {
    "attention": lambda attention, mlp: {"target_modules": attention},
    "all-linear": lambda attention, mlp: {"target_modules": "all-linear", "r": 3},
    "rslora": lambda attention, mlp: {"target_modules": attention, "r": 5, "use_rslora": True},
    "dora": lambda attention, mlp: {"target_modules": mlp, "use_dora": True},
    "rslora-dora-patterns": lambda attention, mlp: {
        "target_modules": attention + mlp,
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {attention[0]: 3, rf"layers\.[12]\.mlp\.{mlp[0]}": 9},
        "alpha_pattern": {f"^model.layers.0.mlp.{mlp[1]}": 3.5, mlp[1]: 7, "mlp.*": 2},
    },
    "regex": lambda attention, mlp: {
        "target_modules": rf".*\.layers\.(0|2)\..*({'|'.join(attention + mlp)})"
    },
    "look-ahead": lambda attention, mlp: {
        "target_modules": rf"^(?!.*layers\.1\.).*\.(?:{attention[0]}|{mlp[1]})$"
    },
    "full-names": lambda attention, mlp: {
        "target_modules": [f"model.layers.1.self_attn.{attention[0]}", f"0.mlp.{mlp[1]}"]
    },
    "exclude-list": lambda attention, mlp: {
        "target_modules": attention + mlp,
        "exclude_modules": [mlp[0], f"layers.1.self_attn.{attention[1]}"],
    },
    "exclude-regex": lambda attention, mlp: {
        "target_modules": "all-linear",
        "exclude_modules": r".*\.layers\.\d\.mlp\..*",
    },
    "layers": lambda attention, mlp: {"target_modules": attention, "layers_to_transform": [0, 2]},
    "layer-zero": lambda attention, mlp: {"target_modules": attention, "layers_to_transform": 0},
    "layers-pattern": lambda attention, mlp: {
        "target_modules": mlp,
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "layers-patterns": lambda attention, mlp: {
        "target_modules": mlp,
        "layers_to_transform": [1, 2],
        "layers_pattern": ["h", "layers"],
    },
    "rank-over-width": lambda attention, mlp: {"target_modules": attention, "r": 64},
    "gaussian": lambda attention, mlp: {
        "target_modules": attention,
        "init_lora_weights": "gaussian",
    },
    "orthogonal": lambda attention, mlp: {
        "target_modules": attention,
        "init_lora_weights": "orthogonal",
    },
    "random": lambda attention, mlp: {"target_modules": mlp, "init_lora_weights": False},
    "task": lambda attention, mlp: {"target_modules": attention, "task_type": "CAUSAL_LM"},
}


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {family: models.save(family, folder) for family in models.FAMILIES}


def save_adapter(model: torch.nn.Module, config: LoraConfig, folder: Path) -> PeftModel:
    """Write an adapter with trained-looking weights; PEFT's advice about them is not wanted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, config)
        peft_model.save_pretrained(folder)
    return peft_model


def check(folder: Path, geometry: Geometry) -> Report:
    read = read_folder(folder)
    return validate(
        read.config_bytes, read.header_prefix, read.tensor_file_size, read.files, geometry
    )


def digest(folder: Path, geometry: Geometry) -> str:
    report = check(folder, geometry)
    return digest_of(core_manifest(report, read_folder(folder).files, geometry.fingerprint))


def layers_of(peft_model: PeftModel) -> dict[str, LoraLayer]:
    return {
        name.removeprefix("base_model.model."): module
        for name, module in peft_model.named_modules()
        if isinstance(module, LoraLayer)
    }


ALL_KINDS_FOR = ("llama",)
SOME_KINDS = ("all-linear", "rslora-dora-patterns", "regex")
COMBINATIONS = [
    (family, kind)
    for family in models.FAMILIES
    for kind in (SERVED if family in ALL_KINDS_FOR else SOME_KINDS)
]


@pytest.mark.parametrize(("family", "kind"), COMBINATIONS)
def test_modules_ranks_and_scales_are_those_of_peft(
    family: str, kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    attention = ATTENTION.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    mlp = MLP.get(family, ["gate_proj", "up_proj", "down_proj"])
    config = LoraConfig(**SERVED[kind](attention, mlp))
    save_adapter(models.build(family), config, tmp_path / "adapter")
    report = check(tmp_path / "adapter", geometry_from_folder(bases[family]))
    expected = layers_of(PeftModel.from_pretrained(models.build(family), tmp_path / "adapter"))
    assert [module.name for module in report.modules] == sorted(expected)
    for module in report.modules:
        layer = expected[module.name]
        assert module.rank == layer.r["default"]
        assert module.scale == pytest.approx(layer.scaling["default"], rel=1e-12)
        assert module.a is not None and module.b is not None
        assert module.a.shape == tuple(layer.lora_A["default"].weight.shape)
        assert module.b.shape == tuple(layer.lora_B["default"].weight.shape)
        assert (module.magnitude is not None) == layer.use_dora["default"]
    assert report.warnings == ()
    assert report.num_modules == len(expected)
    assert report.max_rank == max(layer.r["default"] for layer in expected.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_served_dtype_is_read_at_its_offset(
    dtype: torch.dtype, bases: dict[str, Path], tmp_path: Path
) -> None:
    model = models.build("llama").to(dtype)
    config = LoraConfig(target_modules=["v_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
        peft_model.save_pretrained(tmp_path)
    report = check(tmp_path, geometry_from_folder(bases["llama"]))
    data = (tmp_path / "adapter_model.safetensors").read_bytes()
    layers = layers_of(peft_model)
    for module in report.modules:
        assert module.a is not None
        raw = bytearray(data[module.a.begin : module.a.end])
        tensor = torch.frombuffer(raw, dtype=dtype).reshape(module.a.shape)
        assert torch.equal(tensor, layers[module.name].lora_A["default"].weight)


UNSERVED = {
    "adapter_config.json:use_qalora": {"use_qalora": True, "r": 4, "qalora_group_size": 8},
    "adapter_config.json:init_lora_weights": {"init_lora_weights": "pissa"},
    "adapter_config.json:task_type": {"task_type": "TOKEN_CLS"},
}


@pytest.mark.parametrize("field", UNSERVED)
def test_what_is_not_served_is_refused_by_its_name(
    field: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    fields = {"target_modules": ["q_proj"], **UNSERVED[field]}
    save_adapter(models.build("qwen2"), LoraConfig(**fields), tmp_path)
    with pytest.raises(InvalidAdapter) as caught:
        check(tmp_path, geometry_from_folder(bases["qwen2"]))
    assert field in {violation.field for violation in caught.value.violations}


def test_an_adapter_under_another_name_is_found_in_its_sub_folder(tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["q_proj"])
    peft_model = get_peft_model(models.build("llama"), config, adapter_name="poet")
    peft_model.save_pretrained(tmp_path)
    with pytest.raises(InvalidAdapter) as caught:
        read_folder(tmp_path)
    (violation,) = caught.value.violations
    assert "default" in violation.description and "poet" in violation.description
    assert read_folder(tmp_path / "poet").files


def test_overlapping_rank_patterns_that_peft_reordered_are_refused_as_peft_does(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    ranks = {r"layers\.1\.mlp\.up_proj": 9, "mlp.up_proj": 2}
    config = LoraConfig(target_modules=["q_proj", "up_proj"], rank_pattern=dict(ranks))
    save_adapter(models.build("llama"), config, tmp_path)
    check(tmp_path, geometry_from_folder(bases["llama"]))
    path = tmp_path / "adapter_config.json"
    fields = json.loads(path.read_text())
    fields["rank_pattern"] = dict(reversed(ranks.items()))
    path.write_text(json.dumps(fields))
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(models.build("llama"), tmp_path)
    with pytest.raises(InvalidAdapter) as caught:
        check(tmp_path, geometry_from_folder(bases["llama"]))
    assert "rank_pattern" in caught.value.violations[0].description


def test_an_adapter_of_another_base_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    save_adapter(models.build("llama"), LoraConfig(target_modules=["o_proj"]), tmp_path)
    with pytest.raises(InvalidAdapter) as caught:
        check(tmp_path, geometry_from_folder(bases["qwen3"]))
    violation = caught.value.violations[0]
    prefix = "adapter_model.safetensors:base_model.model.model.layers.0.self_attn.o_proj.lora_A"
    assert violation.field.startswith(prefix)
    assert violation.value == "[8, 32]" and "[8, 64]" in violation.description


def test_the_digest_survives_a_second_save(bases: dict[str, Path], tmp_path: Path) -> None:
    geometry = geometry_from_folder(bases["llama"])
    config = LoraConfig(target_modules=["q_proj", "v_proj", "k_proj"])
    save_adapter(models.build("llama"), config, tmp_path)
    path = tmp_path / "adapter_config.json"
    fields = json.loads(path.read_text())
    first = digest(tmp_path, geometry)
    fields |= {"lora_dropout": 0.3, "peft_version": "0.9.0", "lora_alpha": 8.0}
    fields["target_modules"] = ["v_proj", "k_proj", "q_proj"]
    path.write_text(json.dumps(fields))
    assert digest(tmp_path, geometry) == first
    path.write_text(json.dumps(fields | {"lora_alpha": 9}))
    assert digest(tmp_path, geometry) != first


def test_a_manifest_validates_to_the_same_modules(bases: dict[str, Path], tmp_path: Path) -> None:
    geometry = geometry_from_folder(bases["llama"])
    config = LoraConfig(
        target_modules=["q_proj", "down_proj"], rank_pattern={"q_proj": 2}, use_rslora=True
    )
    save_adapter(models.build("llama"), config, tmp_path)
    read, report = read_folder(tmp_path), check(tmp_path, geometry)
    manifest = parse_manifest(core_manifest(report, read.files, geometry.fingerprint))
    size = manifest.files[0].size
    again = validate(manifest.config_bytes, read.header_prefix, size, (), geometry)
    assert again.modules == report.modules
    assert core_manifest(again, manifest.files, geometry.fingerprint) == core_manifest(
        report, read.files, geometry.fingerprint
    )
