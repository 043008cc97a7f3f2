"""The geometry read from files is the model that transformers builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.adapter_format import geometry_from_folder
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
