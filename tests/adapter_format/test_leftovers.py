"""What stands alongside an adapter in folders of trainers and hubs: left out, taken, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.adapter_format import read_folder
from loraplex.adapter_format.folder import LeftOut, left_out
from tests.adapter_format.builders import refused, write


@pytest.mark.parametrize(
    "name",
    ["training_args.bin", "optimizer.pt", "rng_state_0.pth", "trainer_state.json", "sample.png",
     "eval_results.json", "CARD.md", "requirements.txt", "config.json", "NOTICE",
     "training_loss.png", "trainer_log.jsonl", "spiece.model", "tekken.json",
     "args.json", "additional_config.json", "configuration.json", "events.out.tfevents.1.host"],
)  # fmt: skip
def test_files_of_training_and_pages_are_left_out(name: str, tmp_path: Path) -> None:
    (write(tmp_path) / name).write_bytes(b"x")
    assert name not in {file.path for file in read_folder(tmp_path).files}
    assert left_out(tmp_path) == LeftOut((name,), ())


@pytest.mark.parametrize("name", ["checkpoint-500", "runs", "wandb", "images", "completions",
                                  "additional_chat_templates", "optimizer_0"])  # fmt: skip
def test_folders_of_training_are_left_out(name: str, tmp_path: Path) -> None:
    (write(tmp_path) / name).mkdir()
    assert left_out(tmp_path) == LeftOut((name,), ())


@pytest.mark.parametrize("name", [".cache", ".git", ".gitattributes"])
def test_what_a_download_leaves_is_not_worth_a_word(name: str, tmp_path: Path) -> None:
    (write(tmp_path) / name).mkdir()
    assert left_out(tmp_path) == LeftOut((), ())


@pytest.mark.parametrize(
    "name",
    ["adapter_model.bin", "pytorch_model.bin", "model.pt", "data.pkl", "model.safetensors",
     "train.py", "adapter.tar.gz", "adapter_config.yaml.bin", "Adapter_config.json"],
)  # fmt: skip
def test_other_weights_code_and_archives_stay_refused(name: str, tmp_path: Path) -> None:
    (write(tmp_path) / name).write_bytes(b"x")
    assert name in refused(tmp_path)


def test_another_adapter_in_the_folder_is_left_out_with_the_way_to_it(tmp_path: Path) -> None:
    (write(tmp_path) / "poet").mkdir()
    write(tmp_path / "poet")
    (warning,) = left_out(tmp_path).warnings
    assert warning.field == "poet" and "upload that folder" in warning.description


def test_a_link_is_refused_whatever_its_name(tmp_path: Path) -> None:
    (write(tmp_path) / "training_args.bin").symlink_to("/etc/hostname")
    assert "link" in refused(tmp_path)["training_args.bin"]


MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}


def pipeline(folder: Path, said: dict[str, object], *steps: str, **fields: object) -> Path:
    """An adapter in a folder of sentence-transformers."""
    write(folder, task_type="FEATURE_EXTRACTION", **fields)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    names = ["Transformer", "Pooling", *steps]
    listed = [{"idx": i, "type": f"sentence_transformers.models.{n}"} for i, n in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(listed))
    if "Normalize" in steps:
        (folder / "2_Normalize").mkdir()
    return folder


@pytest.mark.parametrize(
    ("pooling", "steps", "fields"),
    [
        (LAST, ["Normalize"], {}),
        (MEAN, ["Normalize"], {"pooling": "mean"}),
        ({"pooling_mode": "mean"}, [], {"pooling": "mean", "normalize": False}),
    ],
)
def test_a_pipeline_that_says_what_the_config_says_is_read(
    pooling: dict[str, object], steps: list[str], fields: dict[str, object], tmp_path: Path
) -> None:
    pipeline(tmp_path, pooling, *steps, **fields)
    assert {file.path for file in read_folder(tmp_path).files} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert {"1_Pooling", "modules.json"} <= set(left_out(tmp_path).names)


@pytest.mark.parametrize(
    ("pooling", "steps", "field", "hint"),
    [
        (MEAN, ["Normalize"], "1_Pooling/config.json", '"pooling": "mean", "normalize": true'),
        (LAST, [], "1_Pooling/config.json", '"normalize": false'),
        ({"pooling_mode": "cls"}, ["Normalize"], "1_Pooling/config.json:pooling_mode", "served"),
        ({**LAST, **MEAN, "pooling_mode_max_tokens": True}, [], "1_Pooling/config.json", ""),
        ({**LAST, "include_prompt": False}, [], "1_Pooling/config.json:include_prompt", "whole"),
        (LAST, ["Dense"], "modules.json:type", "Normalize"),
    ],
)
def test_a_pipeline_that_gives_other_vectors_is_refused_with_the_way_out(
    pooling: dict[str, object], steps: list[str], field: str, hint: str, tmp_path: Path
) -> None:
    problems = refused(pipeline(tmp_path, pooling, *steps))
    assert any(name.startswith(field) and hint in why for name, why in problems.items()), problems
