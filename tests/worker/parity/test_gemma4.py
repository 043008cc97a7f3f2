"""Gemma 4 as it is published, with every part that only some sizes have, and what is refused."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from loraplex.adapter_format.geometry import geometry_from_folder
from loraplex.errors import InvalidAdapter, LoraplexError, Unsupported
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.dummy_weights import DummyWeights
from loraplex_services.worker.model.families import read_model_config
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.runner.parallel.group import check_group
from tests.worker.parity.adapters import adapter_on, make_adapter
from tests.worker.parity.base_fields import COMMON
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.gemma4_bases import GEMMA4_SMALL
from tests.worker.parity.runners import parity_runner
from tests.worker.parity.suite import Stage, check_mixed_batch, stage_of

FEATURES = ("rank-8-all-linear", "dora-rslora-attention", "experts", "saved-norms", "activated")
ARENA_BYTES = 16 << 20
FULL_HEAD_DIM = 32


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    root = tmp_path_factory.mktemp("gemma4")
    return stage_of(make_base("gemma4-all", root / "base"), FEATURES, root)


@pytest.fixture(scope="module")
def base(stage: Stage) -> TinyBase:
    return stage.base


def test_a_mixed_batch_with_every_part_equals_peft(stage: Stage, near_ties) -> None:
    check_mixed_batch(stage, near_ties, 24)


def test_layers_that_read_the_keys_of_others_have_none_in_the_cache(stage: Stage) -> None:
    _, read = read_model_config(stage.base.folder)
    assert read.kv_sources == (0, 1, 2, 1, 1, 2)
    runner = stage.driver.runner
    # A narrow layer has two heads of 16, a wide one a head of 32: as much, so one layer in a block.
    assert runner.kv_group_windows == (19, 19, None)
    assert runner.block_bytes == 2 * 32 * 16 * 4


def test_a_pass_holds_only_keys_that_several_layers_read_and_none_at_its_end(
    base: TinyBase,
) -> None:
    family, config = read_model_config(base.folder)
    assert config.kv_sources == (0, 1, 2, 1, 1, 2)
    operators, positions = Operators(), torch.arange(3)
    model = family.build(config, DummyWeights(torch.float32, torch.device("cpu")), operators)
    attention = operators.attention_maker.pass_metadata(positions)
    held = _NotedLayers()
    model.forward(
        ForwardBatch(
            torch.zeros_like(positions), positions, attention, LoraBatch((), {}), shared_kv=held
        )
    )
    assert held.layers == [1, 2]
    assert not held


class _NotedLayers(dict[int, tuple[torch.Tensor, torch.Tensor]]):
    """Shared keys and values, and the layers that have put theirs in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[int] = []

    def __setitem__(self, layer: int, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.layers.append(layer)
        super().__setitem__(layer, kv)


def publish(base: TinyBase, folder: Path) -> Path:
    """The base as its makers lay it out: the names of the fields of full layers, two shards, and
    weights of layers that do not use them."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(base.folder / "model.safetensors")
    config = json.loads((base.folder / "config.json").read_text())
    text = config.get("text_config", config)
    del text["per_layer_config"]
    text["global_head_dim"] = FULL_HEAD_DIM
    text["num_global_key_value_heads"] = 1 if text["attention_k_eq_v"] else None
    prefix = "model.language_model" if base.is_multimodal else "model"
    for layer in range(3, 6):
        width = 32 if text["layer_types"][layer] == "sliding_attention" else FULL_HEAD_DIM * 2
        head_dim = 16 if text["layer_types"][layer] == "sliding_attention" else FULL_HEAD_DIM
        own = f"{prefix}.layers.{layer}.self_attn"
        for name in ("k_proj", "v_proj"):
            weight = torch.randn(width, text["hidden_size"], generator=generator)
            tensors[f"{own}.{name}.weight"] = weight
        tensors[f"{own}.k_norm.weight"] = torch.randn(head_dim, generator=generator)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / shard, {"format": "pt"})
    shard_of = {name: shard for shard, own in shards.items() for name in own}
    index = {"metadata": {}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def outputs_of(folder: Path, *adapters: Path, **settings: object) -> list[list[int]]:
    driver = Driver(parity_runner(folder, arena_bytes=ARENA_BYTES, **settings))
    for slot, adapter in enumerate(adapters):
        driver.load(slot, adapter)
    rng = random.Random(0)
    slots = [(), *(((slot, 1.0),) for slot in range(len(adapters)))]
    prompt = [rng.randrange(300) for _ in range(50)]
    jobs = [Job(greedy(f"{i}", prompt, 12), own) for i, own in enumerate(slots)]
    return driver.run(jobs, chunk=17)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyBase, Path]:
    """A multimodal base of the small kind, and the same as published."""
    root = tmp_path_factory.mktemp("small")
    base = make_base("gemma4-multimodal", root / "base")
    return base, publish(base, root / "published")


def test_a_base_as_published_equals_the_one_that_transformers_writes(
    small: tuple[TinyBase, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, published = small
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(published).state_dict()
    for name, weight in base.model.state_dict().items():
        assert weight.equal(theirs[name]), f"{name}: transformers reads another base"
    assert read_model_config(published)[1] == read_model_config(base.folder)[1]
    adapter = make_adapter(base, "rank-8-all-linear", tmp_path / "adapter")
    with caplog.at_level(logging.INFO):
        assert outputs_of(published, adapter) == outputs_of(base.folder, adapter)
    assert any("multimodal" in record.message for record in caplog.records)


def test_adapters_on_modules_that_the_base_does_not_use_change_nothing(
    small: tuple[TinyBase, Path], tmp_path: Path
) -> None:
    """Libraries trained them, without a gradient, before they knew that nothing reads them."""
    base, published = small
    folder = make_adapter(base, "rank-4-attention", tmp_path / "adapter")
    expected = outputs_of(published, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model.model.language_model.layers.4.self_attn.v_proj"
    tensors[f"{prefix}.lora_A.weight"] = torch.ones(4, 48)
    tensors[f"{prefix}.lora_B.weight"] = torch.ones(32, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    assert outputs_of(published, folder) == expected
    assert expected[0] != expected[1], "the adapter does something"


def test_the_wrapper_and_the_text_model_alone_are_one_geometry(
    small: tuple[TinyBase, Path],
) -> None:
    modules = {module.name for module in geometry_from_folder(small[1]).modules}
    assert "model.layers.5.per_layer_projection" in modules
    assert not any("vision" in name or "embed_tokens_per_layer" in name for name in modules)


def test_keys_are_kept_in_int8_where_that_is_asked_for(base: TinyBase) -> None:
    exact, rounded = (outputs_of(base.folder, kv_cache_dtype=t) for t in ("auto", "int8"))
    assert exact[0][:1] == rounded[0][:1]


def test_the_heads_of_many_layers_are_those_that_transformers_reads(tmp_path: Path) -> None:
    """Whose numbers are padded with zeros as keys."""
    fields = {**GEMMA4_SMALL, "num_hidden_layers": 12, "layer_types": None}
    theirs = transformers.Gemma4TextConfig(**{**COMMON, **fields})
    theirs.save_pretrained(tmp_path)
    assert "05" in json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    _, ours = read_model_config(tmp_path)
    heads = [(own.num_key_value_heads, own.head_dim) for own in theirs.per_layer_config]
    assert [(own.count, own.dim) for own in ours.kv_heads] == heads


def test_random_weights_of_its_geometry_can_be_served(base: TinyBase) -> None:
    family, config = read_model_config(base.folder)
    weights = DummyWeights(torch.float32, torch.device("cpu"))
    assert family.build(config, weights, Operators()).config is config


def changed_config(base: TinyBase, folder: Path, change: dict[str, object]) -> Path:
    folder.mkdir()
    config = json.loads((base.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    (folder / "model.safetensors").symlink_to(base.folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input"),
        ({"hidden_size_per_layer_input": "8"}, "hidden_size_per_layer_input"),
        ({"per_layer_config": []}, "per_layer_config"),
        ({"per_layer_config": {"full_attention": {"head_dim": 32}}}, "per_layer_config"),
        ({"per_layer_config": {"2": {"num_attention_heads": 2}}}, "per_layer_config.2"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "num_global_key_value_heads"),
        ({"per_layer_config": {"2": {"head_dim": 7}}}, "global_head_dim"),
        ({"per_layer_config": {"2": {"head_dim": 64}}}, r"layers\.2\.self_attn"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types"),
        ({"top_k_experts": 0}, "top_k_experts"),
        ({"altup_num_inputs": 4}, "altup_num_inputs"),
    ],
    ids=str,
)
def test_a_config_that_is_not_served_is_refused_by_its_field(
    base: TinyBase, tmp_path: Path, change: dict[str, object], field: str
) -> None:
    with pytest.raises(LoraplexError, match=field):
        parity_runner(changed_config(base, tmp_path / "base", change), arena_bytes=ARENA_BYTES)


def test_ranks_that_would_divide_the_heads_of_one_kind_of_layer_are_refused(
    base: TinyBase, tmp_path: Path
) -> None:
    own = {"2": {"num_key_value_heads": 3}}
    change = {"num_attention_heads": 6, "num_key_value_heads": 2, "per_layer_config": own}
    folder = changed_config(base, tmp_path / "base", change)
    with pytest.raises(Unsupported, match=r"config\.json:num_key_value_heads"):
        check_group(folder, "auto", torch.device("cpu"), 2, 2)


def refused(stage: Stage, folder: Path, reason: str) -> None:
    with pytest.raises(InvalidAdapter, match=reason):
        stage.driver.load(90, folder)


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_would_be_served_wrong_are_refused_by_name(
    stage: Stage, base: TinyBase, tmp_path: Path
) -> None:
    added = make_adapter(base, "added-tokens", tmp_path / "added")
    refused(stage, added, r"per-layer embeddings have no rows")
    table = adapter_on(base, tmp_path / "table", r=2, target_modules=["embed_tokens_per_layer"])
    refused(stage, table, r"embed_tokens_per_layer")
    rope = adapter_on(base, tmp_path / "rope", r=2, target_modules=["q_proj"])
    config = json.loads((rope / "adapter_config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (rope / "adapter_config.json").write_text(json.dumps(config))
    refused(stage, rope, "proportional")
