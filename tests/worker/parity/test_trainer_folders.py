"""Folders as Unsloth and Axolotl write them: their files, fields, and ways to name modules."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from loraplex.adapter_format import read_folder
from loraplex.adapter_format.folder import left_out
from tests.worker.parity.adapters import draw
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner

UNSLOTH_PARTS = "self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense|mixer"
UNSLOTH_LINEARS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
UNSLOTH_TARGETS = (
    rf"(?:.*?(?:language|text).*?(?:{UNSLOTH_PARTS}).*?\.(?:{UNSLOTH_LINEARS}))"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}(?!.*\.experts\.\d)\..*?(?:{UNSLOTH_PARTS})"
    rf".*?\.(?:(?:{UNSLOTH_LINEARS})))"
)
"""What it makes of `finetune_language_layers=True` alone."""
AXOLOTL_TARGETS = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
UNSLOTH_FIELDS = {
    "auto_mapping": {
        "base_model_class": "Gemma4ForConditionalGeneration",
        "parent_library": "transformers.models.gemma4.modeling_gemma4",
        "unsloth_fixed": True,
    },
    "kasa_config": None,
    "monteclora_config": None,
    "use_bdlora": None,
    "velora_config": None,
}
OF_UNSLOTH = ("chat_template.jinja", "processor_config.json", "tokenizer.json",
              "tokenizer_config.json", "README.md")  # fmt: skip
OF_AXOLOTL = ("config.json", "debug.log", "special_tokens_map.json", "tokenizer_config.json",
              "README.md", "training_args.bin")  # fmt: skip
OF_CHECKPOINT = ("optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json",
                 "training_args.bin", "tokens_state.json", "README.md")  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_base("gemma4-multimodal", tmp_path_factory.mktemp("base"))


def trained(base: TinyBase, folder: Path, **fields: object) -> Path:
    """An adapter of PEFT's, on all of the base's class, as these tools train it."""
    config = peft.LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(base.model, config)
    try:
        draw(model, torch.Generator().manual_seed(3))
        model.save_pretrained(folder)
    finally:
        model.unload()
    return folder


def add_files(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).write_text("{}" if name.endswith(".json") else "text\n")


def outputs_of(base: TinyBase, folder: Path) -> tuple[list[int], list[int]]:
    """Ours, and PEFT's choices after the same tokens."""
    driver = Driver(parity_runner(base.folder, arena_bytes=16 << 20))
    driver.load(2, folder)
    job = Job(greedy("a", [5, 9, 44, 200, 17], 16), ((2, 1.0),))
    [ours] = driver.run([job])
    logits = Reference(base, {"a": folder}).logits("a", job.request.prompt_ids + ours)
    return ours, logits.argmax(-1)[4:-1].tolist()


def test_an_unsloth_folder_is_served_as_peft_does(base: TinyBase, tmp_path: Path) -> None:
    folder = trained(base, tmp_path / "unsloth", target_modules=UNSLOTH_TARGETS)
    names = load_file(folder / "adapter_model.safetensors")
    assert all("language_model.layers" in name for name in names), "the towers are left alone"
    written = json.loads((folder / "adapter_config.json").read_text())
    named = {"base_model_name_or_path": "unsloth/gemma-4-E2B-it-unsloth-bnb-4bit"}
    (folder / "adapter_config.json").write_text(json.dumps(written | UNSLOTH_FIELDS | named))
    add_files(folder, OF_UNSLOTH)
    assert left_out(folder).names == ("processor_config.json",)
    assert {"chat_template.jinja", "tokenizer.json"} <= {f.path for f in read_folder(folder).files}
    ours, theirs = outputs_of(base, folder)
    assert ours == theirs


def test_an_axolotl_folder_and_its_checkpoint_are_served_as_peft_does(
    base: TinyBase, tmp_path: Path
) -> None:
    folder = trained(base, tmp_path / "axolotl", target_modules=AXOLOTL_TARGETS)
    checkpoint = folder / "checkpoint-12"
    checkpoint.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (checkpoint / name).write_bytes((folder / name).read_bytes())
    add_files(folder, OF_AXOLOTL)
    add_files(checkpoint, OF_CHECKPOINT)
    expected = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert expected <= {file.path for file in read_folder(folder).files}
    assert {file.path for file in read_folder(checkpoint).files} == expected
    assert set(left_out(folder).names) >= {"checkpoint-12", "debug.log", "training_args.bin"}
    ours, theirs = outputs_of(base, checkpoint)
    assert ours == theirs
