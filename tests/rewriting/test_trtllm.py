"""TensorRT-LLM's LoraWeights and LoraConfig: the example of its documentation, and every id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loraplex.adapter_format import Geometry, Module
from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex.rewriting.tensors import open_adapter
from loraplex.rewriting.trtllm import CONFIG_FILE, WEIGHTS_FILE, from_trtllm, to_trtllm
from tests.adapter_format.builders import (
    HIDDEN,
    KV,
    LAYER_SHAPES,
    PREFIX,
    Adapter,
    Tensor,
    lora_pair,
    tensor_file,
    tiny_geometry,
)
from tests.registry.house import CONFIG, TENSORS, adapter_files, write_folder

IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6,
       "up_proj": 7}  # fmt: skip


def _rows(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return np.load(folder / WEIGHTS_FILE), np.load(folder / CONFIG_FILE)


def _save(folder: Path, weights: object, config: object) -> Path:
    folder.mkdir()
    np.save(folder / WEIGHTS_FILE, np.asarray(weights, np.float32))
    np.save(folder / CONFIG_FILE, np.asarray(config, np.int32))
    return folder


def test_every_linear_goes_there_and_back(tmp_path: Path) -> None:
    tensors = {}
    for layer in range(2):
        for module in LAYER_SHAPES:
            tensors |= lora_pair(f"model.layers.{layer}.{module}", 4)
    leaves = [name.split(".")[1] for name in LAYER_SHAPES]
    source = Adapter(tensors=tensor_file(tensors)).with_config(target_modules=leaves)
    folder = write_folder(tmp_path / "peft", {CONFIG: source.config, TENSORS: source.tensors})
    adapter = open_adapter(folder, tiny_geometry())
    assert to_trtllm(adapter, tmp_path / "trt", "F32") == 14
    weights, config = _rows(tmp_path / "trt")
    widest = max(4 * (sum(LAYER_SHAPES[name])) for name in LAYER_SHAPES)
    assert (weights.shape, config.shape) == ((1, 14, widest), (1, 14, 3))
    assert config.dtype == np.int32
    assert config[0].tolist() == [[IDS[name], layer, 4] for layer in range(2) for name in IDS]
    # A as it is, B times alpha / r = 16 / 4, then padding.
    q = weights[0, 0]
    assert set(q[: 4 * HIDDEN]) == {0.5}
    assert set(q[4 * HIDDEN : 8 * HIDDEN]) == {2.0}
    assert not q[8 * HIDDEN :].any()

    report = from_trtllm(
        tmp_path / "trt", tmp_path / "back", tiny_geometry(), "example/tiny", "F32"
    )
    back = open_adapter(tmp_path / "back", tiny_geometry())
    assert report.num_modules == 14
    for before, after in zip(adapter.report.modules, back.report.modules, strict=True):
        assert before.name == after.name
        assert before.a and before.b and after.a and after.b
        was = before.scale * adapter.tensor(before.b) @ adapter.tensor(before.a)
        assert np.array_equal(after.scale * back.tensor(after.b) @ back.tensor(after.a), was)


PAGE_CONFIG = [[1, 0, 2], [2, 0, 4], [1, 1, 2], [2, 1, 4], [1, 2, 2], [1, 3, 8]]
"""The example of TensorRT-LLM's page: 4 layers, hidden size 4, q in all of them, k in two."""


def test_the_example_of_the_documentation_comes_out_number_by_number(tmp_path: Path) -> None:
    layers = range(4)
    modules = [
        Module(f"model.layers.{layer}.self_attn.{leaf}_proj", "linear", 4, 4, False)
        for layer in layers
        for leaf in "kq"
    ]
    geometry = Geometry("llama", "sha256:" + "0" * 64, 4, 16, False, tuple(modules))
    random = np.random.default_rng(1)
    # <rank x 4 in weights>, <4 x rank out weights>, <padding> up to the row of rank 8.
    width = 8 * 4 + 4 * 8
    weights = np.zeros((1, 6, width), np.float32)
    for index, (_, _, rank) in enumerate(PAGE_CONFIG):
        weights[0, index, : 2 * rank * 4] = random.integers(1, 100, 2 * rank * 4) / 8
    folder = _save(tmp_path / "trt", weights, [PAGE_CONFIG])
    report = from_trtllm(folder, tmp_path / "peft", geometry, dtype="F32")
    adapter = open_adapter(tmp_path / "peft", geometry)
    assert (report.num_modules, report.max_rank) == (6, 8)
    for index, (number, layer, rank) in enumerate(PAGE_CONFIG):
        name = f"model.layers.{layer}.self_attn.{'q' if number == 1 else 'k'}_proj"
        [module] = [module for module in adapter.report.modules if module.name == name]
        assert module.a and module.b and (module.rank, module.scale) == (rank, 1.0)
        row = weights[0, index]
        assert np.array_equal(adapter.tensor(module.a), row[: rank * 4].reshape(rank, 4))
        b = row[rank * 4 : 2 * rank * 4].reshape(4, rank)
        assert np.array_equal(adapter.tensor(module.b), b)
    assert to_trtllm(adapter, tmp_path / "again", "F32") == 6
    again, config = _rows(tmp_path / "again")
    assert config[0].tolist() == PAGE_CONFIG
    assert np.array_equal(again, weights)


def _moe_geometry(style: str) -> Geometry:
    """Two layers with three experts: as Mixtral or as Qwen2-MoE call them."""
    shapes = {f"self_attn.{leaf}_proj": (8, 8) for leaf in "qkvo"}
    names, container = ("gate_proj", "down_proj", "up_proj"), "mlp"
    if style == "mixtral":
        names, container = ("w1", "w2", "w3"), "block_sparse_moe"
    pairs = dict(zip(names, ((8, 6), (6, 8), (8, 6)), strict=True))
    shapes |= {f"{container}.experts.{i}.{name}": pairs[name] for i in range(3) for name in names}
    shapes[f"{container}.gate"] = (8, 3)
    if style == "qwen2_moe":
        shapes |= {f"mlp.shared_expert.{name}": pairs[name] for name in names}
        shapes["mlp.shared_expert_gate"] = (8, 1)
    modules = [
        Module(f"model.layers.{layer}.{name}", "linear", *shape, False)
        for layer in range(2)
        for name, shape in shapes.items()
    ]
    modules.sort(key=lambda module: module.name)
    return Geometry(style, "sha256:" + "0" * 64, 2, 16, False, tuple(modules))


@pytest.mark.parametrize(
    ("style", "ids"),
    [("mixtral", [1, 2, 3, 4, 13, 14, 15, 16]), ("qwen2_moe", [*range(1, 8), *range(13, 18)])],
)
def test_experts_routers_and_shared_experts_go_both_ways(
    tmp_path: Path, style: str, ids: list[int]
) -> None:
    geometry = _moe_geometry(style)
    # By id: in and out features, and how many experts share the row.
    shapes = {**dict.fromkeys(range(1, 5), (8, 8, 1)), 16: (8, 3, 1), 17: (8, 1, 1)}
    for first in (5, 13):
        shapes |= {first: (8, 6, 1), first + 1: (6, 8, 1), first + 2: (8, 6, 1)}
    shapes |= {number: (*shapes[number][:2], 3) for number in (13, 14, 15)}
    config = [[number, layer, 2 + layer] for layer in range(2) for number in ids]
    random = np.random.default_rng(2)
    rows = [
        random.normal(size=count * rank * (in_features + out_features)).astype(np.float32)
        for number, _, rank in config
        for in_features, out_features, count in [shapes[number]]
    ]
    weights = np.zeros((1, len(rows), max(row.size for row in rows)), np.float32)
    for index, row in enumerate(rows):
        weights[0, index, : row.size] = row
    folder = _save(tmp_path / "trt", weights, [config])
    from_trtllm(folder, tmp_path / "peft", geometry, dtype="F32")
    adapter = open_adapter(tmp_path / "peft", geometry)
    by_name = {module.name: module for module in adapter.report.modules}
    # Expert 1 of layer 0: the second of three A, then the second of three B.
    inner = "block_sparse_moe.experts.1.w1" if style == "mixtral" else "mlp.experts.1.gate_proj"
    expert = by_name[f"model.layers.0.{inner}"]
    row = rows[ids.index(13)]
    assert expert.a and expert.b
    assert np.array_equal(adapter.tensor(expert.a).reshape(-1), row[16:32])
    assert np.array_equal(adapter.tensor(expert.b).reshape(-1), row[48 + 12 : 48 + 24])

    to_trtllm(adapter, tmp_path / "again", "F32", geometry)
    again, found = _rows(tmp_path / "again")
    assert found[0].tolist() == config
    assert np.array_equal(again, weights)


def test_experts_of_several_ranks_are_padded_to_the_largest(tmp_path: Path) -> None:
    geometry = _moe_geometry("mixtral")
    name = f"{PREFIX}model.layers.0.block_sparse_moe.experts"
    tensors = {}
    for index, rank in ((0, 2), (2, 4)):
        tensors[f"{name}.{index}.w1.lora_A.weight"] = Tensor("F32", (rank, 8))
        tensors[f"{name}.{index}.w1.lora_B.weight"] = Tensor("F32", (6, rank))
    source = Adapter(tensors=tensor_file(tensors)).with_config(
        target_modules=["experts.0.w1", "experts.2.w1"],
        layers_to_transform=[0],
        rank_pattern={"experts.0.w1": 2},
        alpha_pattern={"experts.0.w1": 2},
    )
    files = {CONFIG: source.config, TENSORS: source.tensors}
    adapter = open_adapter(write_folder(tmp_path / "peft", files), geometry)
    with pytest.raises(InvalidRequest, match="--base: is required"):
        to_trtllm(adapter, tmp_path / "none", "F32")
    to_trtllm(adapter, tmp_path / "trt", "F32", geometry)
    weights, config = _rows(tmp_path / "trt")
    assert config[0].tolist() == [[13, 0, 4]]
    a, b = weights[0, 0, : 3 * 32].reshape(3, 4, 8), weights[0, 0, 3 * 32 :].reshape(3, 6, 4)
    assert (a[0, :2] == 0.5).all() and not a[0, 2:].any() and not a[1].any() and (a[2] == 0.5).all()
    # The scale of expert 0 is 2 / 2, that of expert 2 is 16 / 4.
    assert (b[0, :, :2] == 0.5).all() and not b[0, :, 2:].any() and (b[2] == 2.0).all()


@pytest.mark.parametrize(("dtype", "npy"), [("F16", "<f2"), ("BF16", "|V2"), ("F32", "<f4")])
def test_every_storage_type_is_written_and_read(tmp_path: Path, dtype: str, npy: str) -> None:
    files = adapter_files(3)
    adapter = open_adapter(write_folder(tmp_path / "peft", files), tiny_geometry())
    to_trtllm(adapter, tmp_path / "trt", dtype)
    weights, _ = _rows(tmp_path / "trt")
    assert weights.dtype.str == npy
    from_trtllm(tmp_path / "trt", tmp_path / "back", tiny_geometry(), dtype="F32")
    back = open_adapter(tmp_path / "back", tiny_geometry())
    first, second = adapter.report.modules[0], back.report.modules[0]
    assert first.b and second.b
    # 1 + 3/64 and four times it need six bits behind the point: every type holds them.
    assert np.array_equal(back.tensor(second.b), first.scale * adapter.tensor(first.b))


def test_rows_of_several_ranks_become_patterns(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [(1, 0, 2, HIDDEN), (2, 0, 4, KV), (1, 1, 8, HIDDEN)]
    width = 8 * 2 * HIDDEN
    weights = np.zeros((len(rows), width), np.float32)
    for index, (_, _, rank, out) in enumerate(rows):
        weights[index, : rank * (HIDDEN + out)] = random.normal(size=rank * (HIDDEN + out))
    folder = _save(tmp_path / "trt", weights, [row[:3] for row in rows])
    report = from_trtllm(folder, tmp_path / "out", tiny_geometry(), dtype="F32")
    assert {m.name: (m.rank, m.scale) for m in report.modules} == {
        "model.layers.0.self_attn.q_proj": (2, 1.0),
        "model.layers.0.self_attn.k_proj": (4, 1.0),
        "model.layers.1.self_attn.q_proj": (8, 1.0),
    }
    to_trtllm(open_adapter(tmp_path / "out", tiny_geometry()), tmp_path / "again", "F32")
    again, config = _rows(tmp_path / "again")
    assert config[0].tolist() == [list(row[:3]) for row in rows]
    assert np.array_equal(again[0], weights)


def test_a_combined_qkv_row_is_shared_out_to_q_k_and_v(tmp_path: Path) -> None:
    rank, out = 2, HIDDEN + 2 * KV
    weights = np.arange(1, rank * (HIDDEN + out) + 1, dtype=np.float32)[None] / 64
    folder = _save(tmp_path / "trt", weights, [[0, 1, rank]])
    from_trtllm(folder, tmp_path / "out", tiny_geometry(), dtype="F32")
    adapter = open_adapter(tmp_path / "out", tiny_geometry())
    by_leaf = {module.name.rpartition(".")[2]: module for module in adapter.report.modules}
    parts = [by_leaf[leaf].b for leaf in ("q_proj", "k_proj", "v_proj")]
    stacked = np.concatenate([adapter.tensor(part) for part in parts if part])
    assert np.array_equal(stacked, weights[0, rank * HIDDEN :].reshape(out, rank))


@pytest.mark.parametrize(
    ("row", "size", "problem"),
    [
        ([18, 0, 2], 32, "is not a supported module id"),
        ([-1, 0, 2], 32, "is not a supported module id"),
        ([17, 0, 2], 32, "not a module of the base"),
        ([13, 0, 2], 32, "not a module of the base"),
        ([8, 0, 2], 32, "cross attention"),
        ([12, 0, 2], 32, "cross attention"),
        ([1, 2, 2], 32, "not a module of the base"),
        ([1, -1, 2], 32, "not a module of the base"),
        ([1, 0, 0], 32, "rank 0"),
        ([1, 0, -2], 32, "rank -2"),
        ([1, 0, 3], 32, "needs 48 values"),
        ([1, 0, 1], 32, "another base"),
    ],
)
def test_rows_that_do_not_fit_the_base_are_refused_by_their_position(
    tmp_path: Path, row: list[int], size: int, problem: str
) -> None:
    folder = _save(tmp_path / "trt", np.ones((1, size)), [row])
    with pytest.raises(InvalidAdapter) as caught:
        from_trtllm(folder, tmp_path / "out", tiny_geometry())
    [violation] = caught.value.violations
    assert violation.field == f"{CONFIG_FILE}:[0]"
    assert problem in f"{violation.value}: {violation.description}"
    assert not (tmp_path / "out").exists()


def test_pickled_arrays_are_never_opened(tmp_path: Path) -> None:
    folder = _save(tmp_path / "trt", np.ones((1, 32)), [[1, 0, 2]])
    np.save(folder / WEIGHTS_FILE, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        from_trtllm(folder, tmp_path / "out", tiny_geometry())


@pytest.mark.hostile
@pytest.mark.parametrize("values", [1 << 40, -10])
def test_an_array_that_claims_more_values_than_its_file_has_takes_no_memory(
    tmp_path: Path, values: int
) -> None:
    folder = _save(tmp_path / "trt", np.ones((1, 32)), [[1, 0, 2]])
    with (folder / WEIGHTS_FILE).open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (1, 1, values)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        from_trtllm(folder, tmp_path / "out", tiny_geometry())


@pytest.mark.hostile
def test_a_compressed_archive_is_not_opened(tmp_path: Path) -> None:
    folder = _save(tmp_path / "trt", np.ones((1, 32)), [[1, 0, 2]])
    with (folder / WEIGHTS_FILE).open("wb") as file:
        np.savez_compressed(file, a=np.zeros(1 << 20))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        from_trtllm(folder, tmp_path / "out", tiny_geometry())


def test_what_the_format_cannot_carry_is_refused_by_name(tmp_path: Path) -> None:
    files = adapter_files(0, use_dora=False, bias="none")
    folder = write_folder(tmp_path / "peft", files)
    adapter = open_adapter(folder, tiny_geometry())
    to_trtllm(adapter, tmp_path / "fine")
    embedding = Adapter(
        tensors=tensor_file(
            {
                **lora_pair("model.layers.0.self_attn.q_proj", 4),
                "base_model.model.lm_head.lora_A.weight": Tensor("F32", (4, HIDDEN)),
                "base_model.model.lm_head.lora_B.weight": Tensor("F32", (16, 4)),
            }
        )
    ).with_config(target_modules=["q_proj", "lm_head"])
    folder = write_folder(tmp_path / "head", {CONFIG: embedding.config, TENSORS: embedding.tensors})
    with pytest.raises(InvalidAdapter, match="module id") as caught:
        to_trtllm(open_adapter(folder, tiny_geometry()), tmp_path / "out")
    assert caught.value.violations[0].field == f"{TENSORS}:lm_head"
