"""The text model of a multimodal base: its geometry, and adapters in every spelling of names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.adapter_format import geometry_from_folder, validate
from loraplex.adapter_format.text_model import PLAIN, WRAPPED, Spelling, text_config
from loraplex.errors import InvalidAdapter, InvalidRequest, Unsupported
from tests.adapter_format.builders import (
    PREFIX,
    Adapter,
    Tensor,
    good_tensors,
    tensor_file,
    tiny_geometry,
)

transformers = pytest.importorskip("transformers")

TEXT = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "hidden_size": 8,
}
WRAPPER = {
    "model_type": "llava",
    "text_config": TEXT,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 4},
    "tie_word_embeddings": False,
}
PLAIN_TENSORS = {
    "model.embed_tokens.weight": Tensor("F16", (16, 8)),
    "model.layers.0.self_attn.q_proj.weight": Tensor("F16", (12, 8)),
    "model.norm.weight": Tensor("F16", (8,)),
    "lm_head.weight": Tensor("F16", (16, 8)),
}
VISION = {
    "vision_tower.encoder.layers.0.self_attn.q_proj.weight": Tensor("F16", (4, 4)),
    "model.visual.blocks.0.attn.qkv.weight": Tensor("F16", (4, 4)),
    "multi_modal_projector.linear_1.weight": Tensor("F16", (8, 4)),
}
SPELLINGS = (*WRAPPED, PLAIN)


def spelled(tensors: dict[str, Tensor], spelling: Spelling, prefix: str = "") -> dict[str, Tensor]:
    """The same tensors under the names of a spelling."""
    result = {}
    for name, tensor in tensors.items():
        module, _, part = name.removeprefix(prefix).rpartition(".")
        result[f"{prefix}{spelling.of(module)}.{part}"] = tensor
    return result


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, object] = WRAPPER) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(tensor_file(tensors))
    return folder


@pytest.mark.parametrize("spelling", WRAPPED)
def test_a_wrapper_has_the_geometry_of_its_text_model(spelling: Spelling, tmp_path: Path) -> None:
    wrapped = write(tmp_path / "wrapped", {**spelled(PLAIN_TENSORS, spelling), **VISION})
    alone = write(tmp_path / "alone", PLAIN_TENSORS, {**TEXT, "tie_word_embeddings": False})
    assert geometry_from_folder(wrapped).modules == geometry_from_folder(alone).modules
    assert geometry_from_folder(wrapped).model_type == "llama"
    assert not geometry_from_folder(wrapped).tied_embeddings


def test_a_wrapper_without_a_head_is_tied(tmp_path: Path) -> None:
    tensors = {name: t for name, t in PLAIN_TENSORS.items() if name != "lm_head.weight"}
    config = {**WRAPPER, "tie_word_embeddings": True}
    geometry = geometry_from_folder(write(tmp_path, spelled(tensors, WRAPPED[0]), config))
    assert geometry.tied_embeddings
    assert "lm_head" in {module.name for module in geometry.modules}


def test_a_checkpoint_of_vision_weights_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="none of the text model") as error:
        geometry_from_folder(write(tmp_path, VISION))
    assert error.value.violations[0].value == min(VISION)


def test_a_wrapper_without_a_text_config_is_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "llava", "vision_config": {}}
    with pytest.raises(InvalidRequest) as error:
        geometry_from_folder(write(tmp_path, PLAIN_TENSORS, config))
    assert error.value.violations[0].field == "config.json:text_config"


def test_a_wrapper_of_another_type_is_refused_by_its_type(tmp_path: Path) -> None:
    config = {**WRAPPER, "model_type": "gemma9"}
    with pytest.raises(InvalidRequest, match="multimodal") as error:
        geometry_from_folder(write(tmp_path, spelled(PLAIN_TENSORS, WRAPPED[0]), config))
    [violation] = error.value.violations
    assert (violation.field, violation.value) == ("config.json:model_type", "gemma9")


def test_a_missing_shard_of_a_wrapper_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, {})
    (folder / "model.safetensors").unlink()
    names = [*spelled(PLAIN_TENSORS, WRAPPED[0]), *VISION]
    shards = {name: f"model-0000{1 + (name in VISION)}-of-00002.safetensors" for name in names}
    index = {"weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = tensor_file(spelled(PLAIN_TENSORS, WRAPPED[0]))
    (folder / "model-00001-of-00002.safetensors").write_bytes(text)
    with pytest.raises(InvalidRequest) as error:
        geometry_from_folder(folder)
    assert error.value.violations[0].field == "model-00002-of-00002.safetensors"


def test_a_quantised_wrapper_is_refused_by_name(tmp_path: Path) -> None:
    config = {**WRAPPER, "quantization_config": {"quant_method": "quark"}}
    with pytest.raises(InvalidRequest) as error:
        geometry_from_folder(write(tmp_path, spelled(PLAIN_TENSORS, WRAPPED[0]), config))
    assert error.value.violations[0].field == "config.json:quantization_config"


@pytest.mark.parametrize(
    ("wrapper", "model_type", "class_name"),
    [
        ("gemma3", "gemma3_text", "Gemma3TextConfig"),
        ("llava", "llama", "LlamaConfig"),
        ("mistral3", "mistral", "MistralConfig"),
    ],
)
def test_keys_that_a_text_config_leaves_out_mean_what_they_mean_in_transformers(
    wrapper: str, model_type: str, class_name: str
) -> None:
    published = {"model_type": wrapper, "text_config": {"model_type": model_type}}
    ours, theirs = text_config(published, ()), getattr(transformers, class_name)()
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        assert ours[key] == getattr(theirs, key), key
    kv_heads = ours.get("num_key_value_heads", ours["num_attention_heads"])
    assert kv_heads == theirs.num_key_value_heads


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_adapters_in_every_spelling_are_the_same_adapter(spelling: Spelling) -> None:
    tensors = tensor_file(spelled(good_tensors(), spelling, PREFIX))
    report = Adapter(tensors=tensors).validate(tiny_geometry())
    expected = Adapter().validate(tiny_geometry())
    assert [m.name for m in report.modules] == [m.name for m in expected.modules]
    assert [m.scale for m in report.modules] == [m.scale for m in expected.modules]
    assert report.warnings == expected.warnings


def test_patterns_are_matched_with_the_names_that_the_adapter_was_trained_under() -> None:
    tensors = tensor_file(spelled(good_tensors(), WRAPPED[0], PREFIX))
    adapter = Adapter(tensors=tensors)
    wrapped = adapter.with_config(target_modules=r"model\.language_model\..*\.(q_proj|v_proj)")
    assert wrapped.validate(tiny_geometry()).num_modules == 4
    with pytest.raises(InvalidAdapter, match="not selected by target_modules"):
        adapter.with_config(target_modules=r"model\.layers\..*").validate(tiny_geometry())


@pytest.mark.parametrize(
    "module",
    [
        "model.vision_tower.encoder.layers.0.self_attn.q_proj",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "model.visual.blocks.0.attn.qkv",
        "multi_modal_projector.linear_1",
    ],
)
def test_an_adapter_that_trains_a_vision_tower_is_refused_naming_the_modules(module: str) -> None:
    tower = {
        f"{PREFIX}{module}.lora_A.weight": Tensor("F32", (4, 4)),
        f"{PREFIX}{module}.lora_B.weight": Tensor("F32", (4, 4)),
    }
    tensors = tensor_file({**spelled(good_tensors(), WRAPPED[0], PREFIX), **tower})
    config = Adapter().config
    with pytest.raises(InvalidAdapter, match="vision or audio tower") as error:
        validate(config, tensors, len(tensors), (), tiny_geometry(), base_names=("acme/other",))
    assert {violation.value for violation in error.value.violations} == {module}
    assert len(error.value.violations) == 2, "and none that blames the base"


def test_keys_that_match_nothing_are_refused_by_name() -> None:
    stray = {name.replace("layers", "blocks"): t for name, t in good_tensors().items()}
    with pytest.raises(InvalidAdapter, match="the base does not have") as error:
        Adapter(tensors=tensor_file(stray)).validate(tiny_geometry())
    assert len(error.value.violations) == len(stray)


def test_an_adapter_of_the_sibling_size_is_refused_with_both_shapes() -> None:
    larger = {
        name: Tensor(tensor.dtype, tuple(2 * n if n > 4 else n for n in tensor.shape))
        for name, tensor in spelled(good_tensors(), WRAPPED[0], PREFIX).items()
    }
    with pytest.raises(InvalidAdapter, match=r"must be \[4, 8\] on this base") as error:
        Adapter(tensors=tensor_file(larger)).validate(tiny_geometry())
    assert "[4, 16]" in error.value.violations[0].value


def test_a_text_model_type_of_another_kind_than_a_name_is_refused() -> None:
    with pytest.raises(Unsupported) as error:
        text_config({"model_type": "llava", "text_config": {"model_type": 3}}, ())
    assert error.value.violations[0].field == "config.json:text_config.model_type"
