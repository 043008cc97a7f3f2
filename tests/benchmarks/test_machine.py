"""Results of benchmarks: where they are written, and with how many digits."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import machine


def test_results_are_rounded_and_written_under_the_machine_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    path = machine.write_results("sample", {"rows": [{"share": 1 / 3, "count": 12345678}]})
    assert path.parent == tmp_path / machine.machine_kind(machine.cpu_facts())
    written = json.loads(path.read_text())
    assert written["rows"] == [{"share": 0.333333, "count": 12345678}]
    assert machine.read_results("sample") == written
    options = Namespace(tokens=3, work_dir=tmp_path)
    simulated = machine.write_results("sample", {"simulated": True}, options)
    assert json.loads(simulated.read_text())["options"] == {"tokens": 3}
    assert simulated.parent == tmp_path / "simulated"


@pytest.mark.parametrize(
    ("cpu", "family", "model", "kind"),
    [
        ("AMD EPYC", "25", "17", "amd-epyc-zen-4-2c"),
        ("AMD EPYC", "26", "2", "amd-epyc-zen-5-2c"),
        ("AMD EPYC 7763 64-Core Processor", "25", "1", "amd-epyc-7763-64-core-zen-3-2c"),
        ("Intel(R) Xeon(R) Processor", "6", "143", "intel-xeon-2c"),
        ("", "", "", "aarch64-2c"),
    ],
)
def test_the_kind_of_a_machine_names_its_processor(
    cpu: str, family: str, model: str, kind: str
) -> None:
    facts = {"cpu": cpu, "family": family, "model": model}
    assert machine.machine_kind(facts | {"architecture": "aarch64", "num_cores": 2}) == kind


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (123456.789, 123457.0),
        (0.00012345678, 0.000123457),
        (True, True),
        ("1.23456789", "1.23456789"),
    ],
)
def test_only_floats_are_rounded(value: object, expected: object) -> None:
    assert machine.rounded(value) == expected
    assert type(machine.rounded(value)) is type(expected)


def test_what_is_not_finite_becomes_null() -> None:
    assert machine.rounded({"waits": [math.inf, math.nan, 1.0]}) == {"waits": [None, None, 1.0]}


def test_stored_results_are_json() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for path in machine.RESULTS.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)
