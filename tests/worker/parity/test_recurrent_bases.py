"""Bases with recurrent layers as they are published, and what is refused of them by name."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapter_format.geometry import geometry_from_folder
from loraplex.errors import InvalidAdapter, LoraplexError, Unsupported
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.runner.parallel.group import check_group
from tests.worker.parity.adapters import adapter_on, make_adapter
from tests.worker.parity.bases import BASES, DELTA_NETS, TinyBase, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.runners import parity_runner
from tests.worker.parity.suite import MAX_LOGPROB_ERROR, judge, make_jobs, stage_of

PUBLISHED = {
    "attn_output_gate": True,
    "full_attention_interval": 2,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "mlp_only_layers": [],
}
"""What published files say in addition to what transformers writes."""
PROMPTS = ([5, 9, 44], list(range(60, 110)), [7] * 33)


def publish(base: TinyBase, folder: Path) -> Path:
    """The base as its makers lay it out: two shards, a layer that predicts further tokens, and
    all experts of a projection in one tensor."""
    tensors = load_file(base.folder / "model.safetensors")
    stacks: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in list(tensors):
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensors.pop(
                name
            )
    for container, experts in stacks.items():
        ordered = [experts[number] for number in sorted(experts)]
        gate_up = [torch.cat((e["gate_proj"], e["up_proj"])) for e in ordered]
        tensors[f"{container}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{container}.down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    tensors["mtp.layers.0.input_layernorm.weight"] = torch.zeros(64)
    tensors["mtp.fc.weight"] = torch.zeros(64, 128)
    folder.mkdir()
    config = json.loads((base.folder / "config.json").read_text())
    text = config.get("text_config", config)
    text.update({key: value for key, value in PUBLISHED.items() if key not in text})
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / shard)
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def outputs_of(folder: Path, adapters: list[Path]) -> list[list[int]]:
    driver = Driver(parity_runner(folder, arena_bytes=16 << 20))
    for slot, adapter in enumerate(adapters):
        driver.load(slot, adapter)
    slots = [(), *(((slot, 1.0),) for slot in range(len(adapters)))]
    jobs = [
        Job(greedy(f"{i} {own}", prompt, 12), own)
        for i, prompt in enumerate(PROMPTS)
        for own in slots
    ]
    return driver.run(jobs, chunk=17)


@pytest.mark.parametrize("name", ["qwen3.5-multimodal", "qwen3.5-moe", "qwen3-next", "qwen3.5"])
def test_a_base_as_published_equals_the_one_that_transformers_writes(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_base(name, tmp_path / "base")
    published = publish(base, tmp_path / "published")
    assert read_model_config(published)[1] == read_model_config(base.folder)[1]
    assert geometry_from_folder(published) == geometry_from_folder(base.folder)
    features = ["delta-nets", "experts" if "experts" in str(base.model) else "rank-16-mlp"]
    adapters = [make_adapter(base, feature, tmp_path / feature) for feature in features]
    with caplog.at_level(logging.INFO):
        assert outputs_of(published, adapters) == outputs_of(base.folder, adapters)
    what = "multimodal" if base.is_multimodal else "layers that predict further tokens"
    assert any(what in record.message for record in caplog.records), "nothing is said of the rest"


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_a_base_with_as_many_key_heads_as_value_heads_equals_peft(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near_ties: Verdict
) -> None:
    class_name, changes = BASES[name]
    equal = {"linear_num_value_heads": DELTA_NETS["linear_num_key_heads"]}
    monkeypatch.setitem(BASES, f"{name}-equal-heads", (class_name, {**changes, **equal}))
    base = make_base(f"{name}-equal-heads", tmp_path / "base")
    stage = stage_of(base, ["delta-nets", "rank-16-mlp"], tmp_path)
    jobs = make_jobs(stage, 0, 12, stagger=True)
    stage.driver.run([job for _, job in jobs], chunk=17)
    for feature, verdict, error in judge(stage, jobs):
        near_ties.add(verdict)
        assert error < MAX_LOGPROB_ERROR, feature


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_base("qwen3.5", tmp_path_factory.mktemp("base"))


@pytest.mark.filterwarnings("ignore")
def test_lora_on_the_convolution_is_refused_by_name(base: TinyBase, tmp_path: Path) -> None:
    width = base.model.model.layers[0].linear_attn.conv1d.groups
    folder = adapter_on(base, tmp_path / "a", r=width, target_modules=["conv1d", "in_proj_z"])
    driver = Driver(parity_runner(base.folder, arena_bytes=16 << 20))
    with pytest.raises(InvalidAdapter, match=r"layers\.0\.linear_attn\.conv1d.*convolution"):
        driver.load(0, folder)


def test_an_adapter_with_keys_of_the_multimodal_class_fits_the_text_model(
    base: TinyBase, tmp_path: Path
) -> None:
    """Trained as AutoModelForImageTextToText, whose names have `language_model`."""
    folder = make_adapter(base, "delta-nets", tmp_path / "plain")
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {
        k.replace("model.layers.", "model.language_model.layers."): v for k, v in tensors.items()
    }
    save_file(renamed, wrapped / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (wrapped / "adapter_config.json").write_text(json.dumps(config))
    plain, other = (outputs_of(base.folder, [path]) for path in (folder, wrapped))
    assert plain == other
    assert plain[0] != plain[1], "the adapter does something"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"linear_num_value_heads": 6}, "linear_num_value_heads"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"linear_gate_rank": 7}, "linear_gate_rank"),
        ({"linear_key_head_dim": 20}, r"layers\.0\.linear_attn"),
    ],
    ids=str,
)
def test_a_config_that_is_not_served_is_refused_by_its_field(
    base: TinyBase, tmp_path: Path, change: dict[str, object], field: str
) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    config = json.loads((base.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    (folder / "model.safetensors").symlink_to(base.folder / "model.safetensors")
    with pytest.raises(LoraplexError, match=field):
        parity_runner(folder, arena_bytes=16 << 20)


def test_ranks_that_would_divide_a_key_head_are_refused(base: TinyBase, tmp_path: Path) -> None:
    config = json.loads((base.folder / "config.json").read_text())
    few = {"linear_num_key_heads": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | few))
    with pytest.raises(Unsupported, match="linear_num_key_heads"):
        check_group(tmp_path, "auto", torch.device("cpu"), 2, 2)


def test_an_adapter_of_the_sibling_size_is_refused(base: TinyBase, tmp_path: Path) -> None:
    other = make_base("qwen3.5-multimodal", tmp_path / "other")
    folder = make_adapter(other, "rank-64-all-linear", tmp_path / "adapter")
    driver = Driver(parity_runner(base.folder, arena_bytes=16 << 20))
    with pytest.raises(InvalidAdapter, match=r"layers\.4"):
        driver.load(0, folder)


def test_the_fingerprint_tells_other_states_apart(base: TinyBase, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    config = json.loads((base.folder / "config.json").read_text())
    changed = {"linear_num_key_heads": 2, "linear_key_head_dim": 32}
    (folder / "config.json").write_text(json.dumps(config | changed))
    (folder / "model.safetensors").symlink_to(base.folder / "model.safetensors")
    fingerprints = {geometry_from_folder(path).fingerprint for path in (folder, base.folder)}
    assert len(fingerprints) == 2


def test_rotary_pairs_are_those_of_a_key_head(base: TinyBase) -> None:
    assert geometry_from_folder(base.folder).rotary_pairs == 6
