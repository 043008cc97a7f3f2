"""What can be merged and what is refused, and that the same seed gives the same adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.errors import AlreadyExists, InvalidAdapter, InvalidRequest
from loraplex.rewriting.merging import Recipe, merge
from loraplex.rewriting.tensors import open_adapter
from tests.adapter_format.builders import (
    Adapter,
    Tensor,
    good_tensors,
    modules_named,
    tensor_file,
    tiny_geometry,
)
from tests.adapter_format.test_experts import BOTH, sparse_adapter, sparse_geometry
from tests.registry.house import CONFIG, TENSORS, adapter_files, write_folder


def _folder(path: Path, seed: int = 0, **config: object) -> Path:
    return write_folder(path, adapter_files(seed, **config))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_merge_keeps_the_dtype_of_the_first_unless_told(tmp_path: Path, dtype: str) -> None:
    tensors = tensor_file(good_tensors(dtype=dtype), {"format": "pt"})
    files = {CONFIG: Adapter().config, TENSORS: tensors}
    one = write_folder(tmp_path / "one", files)
    merge([(one, 1.0), (one, 1.0)], tmp_path / "out", Recipe())
    merged = open_adapter(tmp_path / "out", tiny_geometry())
    [module, *_] = merged.report.modules
    assert module.a is not None
    assert module.a.dtype == dtype
    # 0.5 everywhere, twice, by sqrt(16 / 4) each.
    assert merged.tensor(module.a).tolist()[0][0] == 2.0
    assert module.scale == 1.0


def test_the_same_seed_drops_the_same_values(tmp_path: Path) -> None:
    folders = [(_folder(tmp_path / str(seed), seed), 1.0) for seed in (1, 2)]
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        merge(folders, tmp_path / name, Recipe("dare_linear", 0.5, seed=seed))
    a, b, c = ((tmp_path / name / TENSORS).read_bytes() for name in "abc")
    assert a == b != c


def test_adapters_of_several_bases_need_the_base_named(tmp_path: Path) -> None:
    folders = [
        (_folder(tmp_path / "one"), 1.0),
        (_folder(tmp_path / "two", base_model_name_or_path="other"), 1.0),
    ]
    with pytest.raises(InvalidAdapter, match="--base"):
        merge(folders, tmp_path / "out", Recipe())
    merge(folders, tmp_path / "out", Recipe(), tiny_geometry())


def test_other_ranks_are_refused_but_for_cat(tmp_path: Path) -> None:
    two = Adapter(tensors=tensor_file(good_tensors(rank=2))).with_config(r=2)
    folders = [
        (_folder(tmp_path / "one"), 1.0),
        (write_folder(tmp_path / "two", {CONFIG: two.config, TENSORS: two.tensors}), 1.0),
    ]
    with pytest.raises(InvalidAdapter, match="--method cat"):
        merge(folders, tmp_path / "out", Recipe("ties"))
    assert not (tmp_path / "out").exists()
    assert merge(folders, tmp_path / "out", Recipe("cat")).max_rank == 6


def test_tensors_other_than_lora_matrices_are_refused_by_name(tmp_path: Path) -> None:
    magnitudes: dict[str, Tensor | None] = {
        f"base_model.model.{name}.lora_magnitude_vector": Tensor("F32", (width,))
        for name, width in zip(modules_named("q_proj", "v_proj"), [8, 4] * 2, strict=True)
    }
    dora = Adapter().with_config(use_dora=True).with_tensors(magnitudes)
    one = write_folder(tmp_path / "one", {CONFIG: dora.config, TENSORS: dora.tensors})
    with pytest.raises(InvalidAdapter, match="lora_magnitude_vector"):
        merge([(one, 1.0), (one, 1.0)], tmp_path / "out", Recipe())


def test_lora_on_parameters_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    adapter = sparse_adapter(BOTH)
    one = write_folder(tmp_path / "one", {CONFIG: adapter.config, TENSORS: adapter.tensors})
    with pytest.raises(InvalidAdapter, match="on experts"):
        merge([(one, 1.0), (one, 1.0)], tmp_path / "out", Recipe("cat"), sparse_geometry())


def test_bad_densities_and_full_folders_are_refused(tmp_path: Path) -> None:
    one = _folder(tmp_path / "one")
    for density in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidRequest, match="--density"):
            merge([(one, 1.0)], tmp_path / "out", Recipe("ties", density))
    with pytest.raises(AlreadyExists):
        merge([(one, 1.0)], one, Recipe())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]


def test_what_overflows_its_dtype_is_refused_and_not_left(tmp_path: Path) -> None:
    one = _folder(tmp_path / "one")
    with pytest.raises(InvalidAdapter, match="NaN or infinite"):
        merge([(one, 1e12)], tmp_path / "out", Recipe("cat"), dtype="F16")
    assert not (tmp_path / "out").exists()


def test_modules_that_only_some_adapters_have_are_named_one_by_one(tmp_path: Path) -> None:
    only_q = {name: t for name, t in good_tensors().items() if "q_proj" in name}
    q = Adapter(tensors=tensor_file(only_q)).with_config(target_modules=["q_proj"])
    folders = [
        (_folder(tmp_path / "one"), 1.0),
        (write_folder(tmp_path / "two", {CONFIG: q.config, TENSORS: q.tensors}), 1.0),
    ]
    merge(folders, tmp_path / "out", Recipe("cat"), tiny_geometry())
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["target_modules"] == sorted(modules_named("q_proj", "v_proj"))
    assert config["rank_pattern"] == dict.fromkeys(modules_named("v_proj"), 4)
    assert config["lora_alpha"] == config["r"] == 8


def test_adapters_of_other_tasks_are_refused_by_name(tmp_path: Path) -> None:
    one = _folder(tmp_path / "one", task_type="FEATURE_EXTRACTION")
    with pytest.raises(InvalidAdapter, match="task_type"):
        merge([(one, 1.0)], tmp_path / "out", Recipe())
