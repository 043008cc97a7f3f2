"""TensorRT-LLM's LoraWeights and LoraConfig: the example of its documentation, there and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex.rewriting.tensors import open_adapter
from loraplex.rewriting.trtllm import CONFIG_FILE, WEIGHTS_FILE, from_trtllm, to_trtllm
from tests.adapter_format.builders import (
    HIDDEN,
    KV,
    LAYER_SHAPES,
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


def test_rows_of_several_ranks_become_patterns(tmp_path: Path) -> None:
    """As in the documentation's example: q and k with other ranks, k not in every layer."""
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
        ([17, 0, 2], 32, "no module id"),
        ([8, 0, 2], 32, "no module id"),
        ([1, 2, 2], 32, "not a module of the base"),
        ([1, -1, 2], 32, "not a module of the base"),
        ([1, 0, 0], 32, "rank 0"),
        ([1, 0, -2], 32, "rank -2"),
        ([1, 0, 3], 32, "needs 48 values"),
        ([1, 0, 1], 32, "another base"),
    ],
)
def test_rows_that_do_not_fit_the_base_are_refused_by_their_place(
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
