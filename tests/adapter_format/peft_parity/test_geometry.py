"""The geometry read from files is the model that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from loraplex.adapter_format import geometry_from_folder, read_folder, validate
from loraplex.errors import InvalidAdapter
from tests.adapter_format.peft_parity import models


@pytest.mark.parametrize("family", models.FAMILIES)
def test_modules_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    geometry = geometry_from_folder(models.save(family, tmp_path))
    model = models.build(family)
    found = {module.name: module for module in geometry.modules}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            described = found.pop(name)
            assert described.kind == ("lm_head" if module is head else "linear")
            assert (described.in_features, described.out_features) == (
                module.in_features,
                module.out_features,
            )
            assert described.has_bias == (module.bias is not None)
        elif isinstance(module, torch.nn.Embedding):
            described = found.pop(name)
            assert described.kind == "embedding"
            assert described.in_features == module.num_embeddings
            assert described.out_features == module.embedding_dim
    assert {module.kind for module in found.values()} == {"norm"}
    assert all(model.get_submodule(name) is not None for name in found)
    assert geometry.model_type == model.config.model_type
    assert geometry.num_layers == 3
    assert geometry.vocab_size == 40
    assert geometry.tied_embeddings == model.config.tie_word_embeddings
    frequencies = dict(model.model.rotary_emb.named_buffers())
    assert {len(f) for name, f in frequencies.items() if "inv_freq" in name} == {
        geometry.rotary_pairs
    }


def test_shards_and_dtype_leave_the_fingerprint_alone(tmp_path: Path) -> None:
    model = models.build("llama")
    model.save_pretrained(tmp_path / "one")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = geometry_from_folder(tmp_path / "one"), geometry_from_folder(tmp_path / "many")
    assert one == many


def test_families_have_different_fingerprints(tmp_path: Path) -> None:
    prints = {geometry_from_folder(models.save(f, tmp_path)).fingerprint for f in models.FAMILIES}
    assert len(prints) == len(models.FAMILIES)


def test_rotary_pairs_do_not_depend_on_a_family_s_default_of_key_heads(tmp_path: Path) -> None:
    folder = models.save("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("num_key_value_heads") < config["num_attention_heads"]
    known = geometry_from_folder(folder).rotary_pairs
    (folder / "config.json").write_text(json.dumps(config))
    assert geometry_from_folder(folder).rotary_pairs == known > 0


@pytest.mark.parametrize(("family", "part"), [("phi3", 0.5), ("llama", 1.0)])
def test_factors_of_a_rope_are_counted_when_an_adapter_is_checked(
    family: str, part: float, tmp_path: Path
) -> None:
    folder = models.save(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"partial_rotary_factor": part}
    (folder / "config.json").write_text(json.dumps(config))
    geometry = geometry_from_folder(folder)
    assert geometry.rotary_pairs == int(8 * part) // 2
    tuned = get_peft_model(models.build(family), LoraConfig(target_modules="all-linear"))
    tuned.save_pretrained(tmp_path / "adapter")
    for count in (geometry.rotary_pairs, geometry.rotary_pairs + 1):
        factors = {"short_factor": [1] * count, "long_factor": [2] * count}
        scaling = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
        path = tmp_path / "adapter" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": scaling}))
        read = read_folder(tmp_path / "adapter")
        given = read.config_bytes, read.header_prefix, read.tensor_file_size, read.files, geometry
        if count == geometry.rotary_pairs:
            assert validate(*given).config.rope_scaling
            continue
        with pytest.raises(InvalidAdapter) as refused:
            validate(*given)
        fields = [violation.field for violation in refused.value.violations]
        assert fields == ["rope_scaling.long_factor", "rope_scaling.short_factor"]
