"""Checks of adapters before they are packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.errors import InvalidAdapter
from loraplex_services.worker.adapters.pack import contents
from loraplex_services.worker.adapters.pack.contents import AdapterReader
from tests.worker import tiny


def _reader(tmp_path: Path, max_rank: int) -> AdapterReader:
    geometry = tiny.base_geometry(tiny.write_base(tmp_path / "base"))
    return AdapterReader(geometry, tiny.layout(max_rank).sites, max_rank)


def test_versions_with_the_same_config_and_header_are_validated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = _reader(tmp_path, 64)
    first, second = (tiny.write_adapter(tmp_path / f"{seed}", seed, 4) for seed in (1, 2))
    report = reader.read(first)
    monkeypatch.setattr(contents, "validate", None)
    assert reader.read(second) is report
    with pytest.raises(TypeError):
        reader.read(tiny.write_adapter(tmp_path / "other", 1, 8))


def test_what_is_refused_is_refused_again(tmp_path: Path) -> None:
    reader = _reader(tmp_path, 2)
    folder = tiny.write_adapter(tmp_path / "large", 1, 4)
    for _ in range(2):
        with pytest.raises(InvalidAdapter):
            reader.read(folder)
