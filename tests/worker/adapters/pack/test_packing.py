"""Images of adapters that are packed one after another."""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from loraplex.errors import InvalidAdapter
from loraplex_services.worker.adapters.pack import packing, values
from loraplex_services.worker.adapters.pack.packing import Packer
from loraplex_services.worker.types.sharding import Shard
from tests.worker import tiny
from tests.worker.engine_stage import make_runner
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import make_base


def _image_bytes(packer: Packer, folder: Path) -> list[bytes]:
    """The images of all ranks, which `packer` writes."""
    packer.write(folder)
    found = [folder / f"image-{fingerprint}" for fingerprint in packer.fingerprints]
    content = [path.read_bytes() for path in found]
    for path in found:
        path.unlink()
    return content


@pytest.mark.parametrize("stored", ["auto", "I8"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_image_is_the_same_whatever_was_packed_before(
    tmp_path: Path, stored: str, num_ranks: int
) -> None:
    geometry = tiny.base_geometry(tiny.write_base(tmp_path / "base"))
    layout = dataclasses.replace(tiny.layout(), stored=stored, shard=Shard(0, num_ranks))
    packer = Packer(geometry, layout)
    for seed, rank in ((1, 4), (2, 4), (3, 8), (4, 8), (5, 4)):
        folder = tiny.write_adapter(tmp_path / f"{seed}", seed, rank)
        assert _image_bytes(packer, folder) == _image_bytes(Packer(geometry, layout), folder)


def test_an_adapter_that_is_refused_leaves_nothing_to_those_after_it(tmp_path: Path) -> None:
    geometry = tiny.base_geometry(tiny.write_base(tmp_path / "base"))
    packer = Packer(geometry, tiny.layout())
    good, diverged = (tiny.write_adapter(tmp_path / f"{seed}", seed) for seed in (1, 2))
    tensors = diverged / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4] + struct.pack("<f", math.nan))
    expected = _image_bytes(Packer(geometry, tiny.layout()), good)
    for _ in range(2):
        with pytest.raises(InvalidAdapter):
            packer.write(diverged)
        assert _image_bytes(packer, good) == expected


def test_versions_with_the_same_config_and_header_are_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer = Packer(tiny.base_geometry(tiny.write_base(tmp_path / "base")), tiny.layout())
    first, second = (tiny.write_adapter(tmp_path / f"{seed}", seed) for seed in (1, 2))
    packer.write(first)
    monkeypatch.setattr(packing, "plan_sites", None)
    packer.write(second)
    with pytest.raises(TypeError):
        packer.write(tiny.write_adapter(tmp_path / "other", 1, 8))


def test_stacked_experts_are_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of them again for each expert, which takes minutes if there are many."""
    adapter = make_adapter(make_base("mixtral", tmp_path / "base"), "experts", tmp_path / "adapter")
    layout = make_runner(tmp_path, dtype="bfloat16").layout
    sizes = []
    widened = values._widened

    def counted(own: values.Values) -> np.ndarray:
        sizes.append(own.data.size)
        return widened(own)

    monkeypatch.setattr(values, "_widened", counted)
    Packer(tiny.base_geometry(tmp_path / "base"), layout).write(adapter)
    published = load_file(adapter / "adapter_model.safetensors").values()
    assert sum(sizes) == sum(tensor.size for tensor in published)
