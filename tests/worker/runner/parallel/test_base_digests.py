"""Bases that differ have different digests, wherever they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex_services.worker.runner.parallel.base_digests import config_digest, weights_digest
from tests.worker import tiny

FILE = "model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.write_base(tmp_path / "base")


def test_a_copy_has_the_same_digests(base, tmp_path):
    copy = shutil.copytree(base, tmp_path / "copy", copy_function=shutil.copy)
    assert weights_digest(copy) == weights_digest(base)
    assert config_digest(copy) == config_digest(base)


def test_one_changed_weight_at_an_end_of_a_tensor_changes_the_digest(base):
    before = weights_digest(base)
    tensors = load_file(base / FILE)
    for name in list(tensors)[:2]:
        for index in (0, -1):
            changed = {key: tensor.clone() for key, tensor in tensors.items()}
            changed[name].view(-1)[index] += 1
            save_file(changed, base / FILE)
            assert weights_digest(base) != before


def test_other_weights_shapes_and_files_change_the_digest(base, tmp_path):
    digests = {weights_digest(base), weights_digest(tiny.write_base(tmp_path / "other", seed=1))}
    tensors = load_file(base / FILE)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(half, base / FILE)
    digests.add(weights_digest(base))
    save_file(tensors, base / "model-2.safetensors")
    digests.add(weights_digest(base))
    assert len(digests) == 4
    assert weights_digest(tmp_path) not in digests  # of a base without files


def test_another_config_changes_the_digest(base):
    before = config_digest(base)
    path = base / "config.json"
    path.write_text(path.read_text().replace("llama", "mistral"))
    assert config_digest(base) != before
