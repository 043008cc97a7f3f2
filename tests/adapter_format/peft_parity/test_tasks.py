"""Adapters of classification and embedding models: their modules have other names than under a
causal model, and a head that no base has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from loraplex.adapter_format import (
    Report,
    core_manifest,
    geometry_from_folder,
    parse_manifest,
    read_folder,
    validate,
)
from loraplex.errors import InvalidAdapter
from tests.adapter_format.peft_parity import models

SCORE = "base_model.model.score.weight"
NUM_LABELS = 3
CLASSES = {
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "FEATURE_EXTRACTION": transformers.AutoModel,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("qwen2", tmp_path_factory.mktemp("base"))


def write(folder: Path, task: str, **fields: object) -> Path:
    config = models.FAMILIES["qwen2"]()
    config.num_labels = NUM_LABELS
    model = CLASSES[task].from_config(config)
    lora = LoraConfig(**{"task_type": task, "target_modules": "all-linear", **fields})
    get_peft_model(model, lora).save_pretrained(folder)
    (folder / "README.md").unlink()
    return folder


def check(folder: Path, base: Path | None) -> Report:
    read = read_folder(folder)
    geometry = geometry_from_folder(base) if base else None
    head = read.config_bytes, read.header_prefix, read.tensor_file_size
    return validate(*head, read.files, geometry)


FEATURES = {
    "plain": {},
    "dora": {"use_dora": True},
    "bias": {"bias": "all", "target_modules": ["q_proj"]},
    "norms": {"modules_to_save": ["input_layernorm", "score"]},
    "table": {"modules_to_save": ["embed_tokens"], "target_modules": ["v_proj"]},
    "tokens": {"trainable_token_indices": [3, 9]},
    "head-targeted-too": {"target_modules": ["q_proj", "score"]},
    "expression": {"target_modules": r"model\.layers\.\d+\.mlp\.up_proj"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feature", FEATURES)
def test_a_classifier_as_peft_writes_it_has_its_head_and_keeps_its_task(
    base: Path, tmp_path: Path, feature: str
) -> None:
    report = check(write(tmp_path, "SEQ_CLS", **FEATURES[feature]), base)
    assert (report.num_labels, report.warnings) == (NUM_LABELS, ())
    [head] = [module for module in report.modules if module.name == "score"]
    assert head.full is not None and head.full.shape == (NUM_LABELS, models.SIZES["hidden_size"])
    manifest = core_manifest(report, read_folder(tmp_path).files, report.base_fingerprint)
    (tmp_path / "adapter_config.json").write_bytes(parse_manifest(manifest).config_bytes)
    again = check(tmp_path, base)
    assert again.modules == report.modules and again.num_labels == NUM_LABELS
    assert core_manifest(again, read_folder(tmp_path).files, again.base_fingerprint) == manifest


def test_a_config_of_before_peft_wrote_the_head_into_modules_to_save_means_the_same(
    base: Path, tmp_path: Path
) -> None:
    write(tmp_path, "SEQ_CLS")
    edit(tmp_path, modules_to_save=None)
    assert check(tmp_path, base).num_labels == NUM_LABELS


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], r"layers\.1\.self_attn\.\w+"])
def test_names_of_an_embedding_model_are_found_in_the_base(
    base: Path, tmp_path: Path, targets: object
) -> None:
    report = check(write(tmp_path, "FEATURE_EXTRACTION", target_modules=targets), base)
    names = {module.name for module in geometry_from_folder(base).modules}
    assert report.modules and {module.name for module in report.modules} <= names
    assert report.num_labels == 0 and report.config.task == "FEATURE_EXTRACTION"


def test_what_is_said_of_labels_and_pooling_is_kept_in_the_identity(
    base: Path, tmp_path: Path
) -> None:
    before = check(write(tmp_path, "SEQ_CLS"), base)
    edit(tmp_path, id2label={"0": "a", "1": "b", "2": "c"}, pad_token_id=5, num_labels=3)
    edit(tmp_path, problem_type="multi_label_classification", pooling="mean", normalize=False)
    report = check(tmp_path, base)
    said = report.config.pooling
    assert (said.labels, said.pad_token_id, said.normalize) == (("a", "b", "c"), 5, False)
    assert (said.problem_type, said.pooling) == ("multi_label_classification", "mean")
    files = read_folder(tmp_path).files
    manifest = core_manifest(report, files, report.base_fingerprint)
    assert manifest != core_manifest(before, files, report.base_fingerprint)
    (tmp_path / "adapter_config.json").write_bytes(parse_manifest(manifest).config_bytes)
    assert check(tmp_path, base).config.pooling == said


def edit(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return apply


REFUSED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "no head": ("safetensors:score", tensors(lambda t: t.pop(SCORE))),
    "too narrow": (SCORE, tensors(lambda t: t.update({SCORE: torch.zeros(3, 31)}))),
    "no labels": (SCORE, tensors(lambda t: t.update({SCORE: torch.zeros(0, 32)}))),
    "one dimension": (SCORE, tensors(lambda t: t.update({SCORE: torch.zeros(32)}))),
    "head with a bias": (
        "score.bias",
        tensors(lambda t: t.update({"base_model.model.score.bias": torch.zeros(3)})),
    ),
    "another class's head": (
        "classifier.weight",
        tensors(lambda t: t.update({"base_model.model.classifier.weight": torch.zeros(3, 32)})),
    ),
    "LoRA on the head of a causal model": (
        "lm_head.lora_A",
        tensors(
            lambda t: t.update(
                {
                    "base_model.model.lm_head.lora_A.weight": torch.zeros(8, 32),
                    "base_model.model.lm_head.lora_B.weight": torch.zeros(40, 8),
                }
            )
        ),
    ),
    "a causal task": (SCORE, lambda folder: edit(folder, task_type="CAUSAL_LM")),
    "no task": (SCORE, lambda folder: edit(folder, task_type=None)),
    "names of other labels": (
        "id2label",
        lambda folder: edit(folder, id2label={"0": "good", "1": "bad"}),
    ),
    "names of many characters": (
        "id2label",
        lambda folder: edit(folder, id2label={str(label): 256 * "x" for label in range(300)}),
    ),
    "a gap in the names": ("id2label", lambda folder: edit(folder, id2label={"0": "a", "2": "c"})),
    "another number of labels": ("num_labels", lambda folder: edit(folder, num_labels=2)),
    "a problem of no type": ("problem_type", lambda folder: edit(folder, problem_type="hard")),
    "a padding that is no token": ("pad_token_id", lambda folder: edit(folder, pad_token_id=-1)),
    "a pooling that is none": ("pooling", lambda folder: edit(folder, pooling="max")),
    "names without a head": (
        "id2label",
        lambda folder: edit(folder, task_type="CAUSAL_LM", id2label={"0": "good"}),
    ),
    "another task": ("task_type", lambda folder: edit(folder, task_type="TOKEN_CLS")),
    "an invocation": (
        "task_type",
        lambda folder: edit(folder, alora_invocation_tokens=[3], modules_to_save=None),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_cannot_be_served_right_is_refused_by_its_name(
    base: Path, tmp_path: Path, case: str
) -> None:
    field, spoil = REFUSED[case]
    spoil(write(tmp_path, "SEQ_CLS", target_modules=["q_proj"]))
    with pytest.raises(InvalidAdapter) as caught:
        check(tmp_path, base)
    assert any(field in violation.field for violation in caught.value.violations), caught.value
