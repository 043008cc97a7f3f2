"""A Trainer publishes its adapter at each save."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from loraplex import BlockingRegistry, Publication
from loraplex.errors import InvalidAdapter
from loraplex.training import STEP_LABEL, PublishCallback
from tests.e2e.stack import DEMO, Stack


def _saved(output_dir: Path, step: int) -> tuple[Any, Any]:
    """What a Trainer passes to its callbacks after the save of a step."""
    torch.manual_seed(step)
    base = AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(output_dir / f"checkpoint-{step}")
    (output_dir / f"checkpoint-{step}" / "optimizer.pt").write_bytes(b"state")
    args = SimpleNamespace(output_dir=str(output_dir))
    return args, SimpleNamespace(global_step=step, is_world_process_zero=True)


def test_each_save_becomes_a_version_with_its_step(stack: Stack, tmp_path: Path) -> None:
    callback = PublishCallback(
        Publication("trained", base_id="loraplex-demo", keep_versions=2), stack.registry
    )
    for step in (10, 20):
        callback.on_save(*_saved(tmp_path, step), control=None)
    with BlockingRegistry(stack.registry) as registry:
        versions = list(registry.list(name="trained", all_versions=True))
    assert [version.labels[STEP_LABEL] for version in versions] == ["10", "20"]
    assert stack.complete("trained", "a=")["choices"][0]["text"] is not None


def test_other_ranks_publish_nothing(stack: Stack, tmp_path: Path) -> None:
    args, state = _saved(tmp_path, 10)
    state.is_world_process_zero = False
    PublishCallback(Publication("by-rank-1"), stack.registry).on_save(args, state, control=None)
    with BlockingRegistry(stack.registry) as registry:
        assert not list(registry.list(name="by-rank-1"))


def test_a_failed_publication_stops_training_only_if_it_must_succeed(
    stack: Stack, tmp_path: Path
) -> None:
    args, state = _saved(tmp_path, 10)
    (tmp_path / "checkpoint-10" / "adapter_model.safetensors").unlink()
    publication = Publication("half-written")
    PublishCallback(publication, stack.registry).on_save(args, state, control=None)
    callback = PublishCallback(publication, stack.registry, must_succeed=True)
    with pytest.raises(InvalidAdapter):
        callback.on_save(args, state, control=None)
