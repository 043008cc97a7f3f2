"""Multimodal bases in the layout of transformers 4, in which most of them were published: other
names, several shards with an index, and old spellings in the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from loraplex.adapter_format.geometry import geometry_from_folder
from loraplex.errors import InvalidRequest
from loraplex_services.worker.model.families import read_model_config
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.runners import parity_runner

DAILY = "mistral3-multimodal"
BASES = (DAILY, "gemma3-multimodal", "ministral3", "llava")
NUM_SHARDS = 3


def publish(base: TinyBase, folder: Path) -> Path:
    """The same weights as transformers 4 wrote them."""
    folder.mkdir()
    config = json.loads((base.folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["text_config"].pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(base.folder / "model.safetensors")
    renamed = {old_name(name): tensor for name, tensor in tensors.items()}
    names = sorted(renamed)
    index = {}
    for shard in range(NUM_SHARDS):
        file = f"model-{shard + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        own = {name: renamed[name] for name in names[shard::NUM_SHARDS]}
        save_file(own, folder / file, {"format": "pt"})
        index |= dict.fromkeys(own, file)
    written = {"metadata": {"total_size": 0}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(written))
    return folder


def old_name(name: str) -> str:
    for new, old in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    ):
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def outputs_of(folder: Path, adapter: Path) -> list[list[int]]:
    driver = Driver(parity_runner(folder, arena_bytes=16 << 20))
    driver.load(0, adapter)
    prompt = list(range(60, 110))
    jobs = [Job(greedy("base", prompt, 12)), Job(greedy("adapted", prompt, 12), ((0, 1.0),))]
    return driver.run(jobs, chunk=17)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != DAILY)) for n in BASES]
)
def test_a_base_in_the_old_layout_is_the_one_that_transformers_reads(
    name: str, tmp_path: Path
) -> None:
    base = make_base(name, tmp_path / "base")
    published = publish(base, tmp_path / "published")
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(published).state_dict()
    for key, weight in base.model.state_dict().items():
        assert weight.equal(theirs[key]), f"{key}: transformers reads another base"
    assert read_model_config(published)[1] == read_model_config(base.folder)[1]
    assert geometry_from_folder(published) == geometry_from_folder(base.folder)
    adapter = make_adapter(base, "rank-8-all-linear", tmp_path / "adapter")
    ours = outputs_of(published, adapter)
    assert ours == outputs_of(base.folder, adapter)
    assert ours[0] != ours[1], "the adapter does something"
    shard = published / "model-00002-of-00003.safetensors"
    shard.unlink()
    for read in (geometry_from_folder, lambda folder: parity_runner(folder, arena_bytes=1 << 20)):
        with pytest.raises(InvalidRequest, match=shard.name):
            read(published)


def publish_qwen(base: TinyBase, folder: Path) -> Path:
    """The same weights as Qwen published them: the keys of the text model next to those of the
    vision tower, and the experts of Qwen 3 VL with their inputs before their outputs."""
    folder.mkdir()
    config = json.loads((base.folder / "config.json").read_text())
    tensors = load_file(base.folder / "model.safetensors")
    if base.name == "qwen3-vl-moe":
        tensors = {k: t.mT.contiguous() if ".experts." in k else t for k, t in tensors.items()}
    else:
        text = config.pop("text_config")
        sections = text.pop("rope_parameters")["mrope_section"]
        rope = {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": sections}}
        config = {**text, **config, **rope}
        names = (("model.language_model.", "model."), ("model.visual.", "visual."))
        for new, old in names:
            tensors = {k.replace(new, old): t for k, t in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5-vl",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen2-vl", "qwen3-vl-moe")),
    ],
)
def test_a_published_base_of_qwen_is_the_one_that_transformers_reads(
    name: str, tmp_path: Path
) -> None:
    base = make_base(name, tmp_path / "base")
    published = publish_qwen(base, tmp_path / "published")
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(published).state_dict()
    for key, weight in base.model.state_dict().items():
        assert weight.equal(theirs[key]), f"{key}: transformers reads another base"
    assert read_model_config(published)[1] == read_model_config(base.folder)[1]
    assert geometry_from_folder(published).modules == geometry_from_folder(base.folder).modules
    adapter = make_adapter(base, "rank-4-attention", tmp_path / "adapter")
    assert outputs_of(published, adapter) == outputs_of(base.folder, adapter)
