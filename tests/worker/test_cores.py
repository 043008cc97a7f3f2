"""Threads follow what a container may use, not what its machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex_services.worker.cores import usable_cores


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("400000 100000\n", 4),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("6400000 100000\n", 16),
        ("max 100000\n", 16),
        ("nonsense", 16),
    ],
)
def test_a_limit_of_version_2_counts(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 16)])
def test_a_limit_of_version_1_counts(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


def test_without_a_limit_all_cores_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 16
