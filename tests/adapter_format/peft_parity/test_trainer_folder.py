"""A folder as transformers' Trainer leaves it: the adapter is read, its training stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from loraplex.adapter_format import geometry_from_folder, read_folder, validate
from loraplex.adapter_format.folder import left_out
from loraplex.errors import InvalidAdapter
from tests.adapter_format.peft_parity import models


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of training, a checkpoint after each, and the end."""
    folder = tmp_path_factory.mktemp("output")
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    texts = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, save_steps=1, report_to="none", disable_tqdm=True, use_cpu=True,
        per_device_train_batch_size=1,
    )  # fmt: skip
    trainer = transformers.Trainer(
        get_peft_model(models.build("llama"), config), arguments, train_dataset=texts
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"loss": 1.0})
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_trainers_output_is_an_adapter_and_the_rest_is_named(
    output: Path, tmp_path: Path
) -> None:
    folder = read_folder(output)
    report = validate(
        folder.config_bytes, folder.header_prefix, folder.tensor_file_size, folder.files,
        geometry_from_folder(models.save("llama", tmp_path)),
    )  # fmt: skip
    assert report.num_modules == 3
    kept = {file.path for file in folder.files}
    left = set(left_out(output).names)
    assert left >= {"checkpoint-1", "checkpoint-2", "training_args.bin", "trainer_state.json"}
    assert kept >= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert kept | left == {path.name for path in output.iterdir()}


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_is_an_adapter(output: Path) -> None:
    left = set(left_out(output / "checkpoint-2").names)
    assert left >= {"optimizer.pt", "scheduler.pt", "rng_state.pth"}


@pytest.mark.filterwarnings("ignore")
def test_an_output_without_its_end_points_at_the_last_checkpoint(
    output: Path, tmp_path: Path
) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        (output / name).rename(tmp_path / name)
    try:
        with pytest.raises(InvalidAdapter) as caught:
            read_folder(tmp_path)
    finally:
        for name in ("checkpoint-1", "checkpoint-2"):
            (tmp_path / name).rename(output / name)
    assert any(str(tmp_path / "checkpoint-2") in v.description for v in caught.value.violations)
