"""Copies of an adapter that are other adapters, yet hardly differ."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from loraplex.adapter_format import read_folder
from loraplex.adapter_format.safetensors_header import TENSOR_FILE, parse_header
from loraplex.errors import InvalidRequest
from loraplex.workload.adapter_variants import source_folders, write_variant

DEMO = Path(__file__).parents[2] / "demo" / "adapters"
SOURCE = DEMO / "mask"


def test_variants_differ_from_each_other_in_last_bits_only(tmp_path: Path) -> None:
    for variant in range(20):
        write_variant(SOURCE, variant, tmp_path / str(variant))
    files = [(tmp_path / str(n) / TENSOR_FILE).read_bytes() for n in range(20)]
    assert files[0] == (SOURCE / TENSOR_FILE).read_bytes()
    assert len(set(files)) == 20
    for content in files[1:]:
        assert len(content) == len(files[0])
        changed = [a ^ b for a, b in zip(content, files[0], strict=True) if a != b]
        assert set(changed) == {1} and len(changed) <= 5


def test_a_variant_is_a_valid_folder_with_values_close_to_its_original(tmp_path: Path) -> None:
    write_variant(SOURCE, 0b1011, tmp_path / "copy")
    folder = read_folder(tmp_path / "copy")
    tensor = min(
        parse_header(folder.header_prefix, folder.tensor_file_size).tensors, key=lambda t: t.begin
    )
    form = {"F32": "<16f", "F16": "<16e"}[tensor.dtype]
    old, new = (
        struct.unpack_from(form, (path / TENSOR_FILE).read_bytes(), tensor.begin)
        for path in (SOURCE, tmp_path / "copy")
    )
    assert old != new
    assert new == pytest.approx(old, rel=2e-3)


def test_a_folder_of_adapters_is_taken_by_name_and_one_adapter_as_itself() -> None:
    assert [folder.name for folder in source_folders(DEMO)][:2] == ["digit-sum", "mask"]
    assert source_folders(SOURCE) == [SOURCE]


def test_a_folder_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="prepare-from"):
        source_folders(tmp_path / "absent")
