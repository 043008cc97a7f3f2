"""Folders as Tinker, Unsloth and Axolotl write them, through the whole stack, against PEFT."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e import stack as stacks
from tests.e2e.test_any_base import NUM_NEW_TOKENS, ask, save_tokenizer
from tests.rewriting.test_respelling import export_of, merged
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference
from tests.worker.parity.test_trainer_folders import (
    AXOLOTL_TARGETS,
    OF_AXOLOTL,
    OF_UNSLOTH,
    UNSLOTH_FIELDS,
    UNSLOTH_TARGETS,
    add_files,
    trained,
)

pytestmark = pytest.mark.long


def answers(
    base: TinyBase, folders: Mapping[str, Path], state: Path, flags: Sequence[str] = ()
) -> list[tuple[str, list[int], list[int]]]:
    """Upload folders as they are; (adapter, prompt, tokens) of three requests for each."""
    save_tokenizer(base.folder)
    rng = random.Random(base.name)
    stack = stacks.start(state, "--dtype", "float32", model=base.folder)
    try:
        for name, folder in folders.items():
            stack.run_registry("upload", str(folder), "--name", name, *flags)
        prompts = [[rng.randrange(300) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
        return [(n, prompt, ask(stack, (n, prompt))) for n in folders for prompt in prompts]
    finally:
        assert stack.stop() == 0


def check(
    base: TinyBase,
    models: Mapping[str, torch.nn.Module],
    found: Sequence[tuple[str, list[int], list[int]]],
) -> None:
    """Every token is the model's choice after those before it."""
    verdict, reference = Verdict(), Reference(base, {})

    @torch.inference_mode()
    def logits64(name: str, tokens: list[int], num_prompt: int) -> torch.Tensor:
        return reference.logits_of(copy.deepcopy(models[name]).double(), tokens, num_prompt)

    for name, prompt, ours in found:
        assert len(ours) == NUM_NEW_TOKENS
        tokens = prompt + ours
        with torch.inference_mode():
            expected = reference.logits_of(models[name], tokens, len(prompt))
        exact = partial(logits64, name, tokens, len(prompt))
        verdict.judge(len(prompt), ours, expected, exact, name)
    verdict.finish()


@pytest.mark.parametrize("base_name", ["llama", "qwen3.5-moe", "gpt-oss"])
def test_an_export_of_tinker_answers_as_its_deltas_do(base_name: str, tmp_path: Path) -> None:
    base = make_base(base_name, tmp_path / "base")
    export = export_of(base)
    folder = export.write(tmp_path / "export")
    found = answers(base, {"tinker": folder}, tmp_path / "state", ("--convert",))
    check(base, {"tinker": merged(base, export.deltas)}, found)


def test_folders_of_unsloth_and_axolotl_answer_as_peft_does(tmp_path: Path) -> None:
    base = make_base("gemma4-multimodal", tmp_path / "base")
    unsloth = trained(base, tmp_path / "unsloth", target_modules=UNSLOTH_TARGETS)
    config = unsloth / "adapter_config.json"
    named = {"base_model_name_or_path": "unsloth/gemma-4-E2B-it-unsloth-bnb-4bit"}
    config.write_text(json.dumps(json.loads(config.read_text()) | UNSLOTH_FIELDS | named))
    add_files(unsloth, tuple(name for name in OF_UNSLOTH if not name.startswith("tokenizer")))
    axolotl = trained(base, tmp_path / "axolotl", target_modules=AXOLOTL_TARGETS)
    add_files(axolotl, tuple(name for name in OF_AXOLOTL if not name.startswith("tokenizer")))
    folders = {"unsloth": unsloth, "axolotl": axolotl}
    found = answers(base, folders, tmp_path / "state")
    reference = Reference(base, folders)
    check(base, {name: reference.model(name) for name in folders}, found)
