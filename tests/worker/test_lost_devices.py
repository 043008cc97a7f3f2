"""A GPU that is lost to one process of the test run is not lost to the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = """
import torch

torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = lambda: None


def test_before():
    pass


def test_an_ordinary_failure():
    raise AssertionError


def test_lost():
    def refuse():
        raise RuntimeError("CUDA error: device-side assert triggered")

    torch.cuda.synchronize = refuse
    torch.cuda.synchronize()


def test_after():
    torch.cuda.synchronize()


def test_last():
    torch.cuda.synchronize()
"""


@pytest.mark.long
def test_tests_after_an_error_of_the_device_run_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "test_device.py").write_text(TESTS)
    options = ["-q", "-n", "1", "-p", "tests.worker.conftest", "-p", "no:cacheprovider"]
    options += ["--rootdir", str(tmp_path), "-c", os.devnull, "--junitxml", "found.xml"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "found.xml").exists(), done.stdout + done.stderr
    failures: dict[str, list[str]] = {}
    for case in ElementTree.parse(tmp_path / "found.xml").getroot().iter("testcase"):
        found = [*case.iter("failure"), *case.iter("error")]
        failures.setdefault(case.get("name", ""), []).extend(e.get("message", "") for e in found)
    assert failures["test_before"] == failures["test_after"] == failures["test_last"] == []
    assert len(failures["test_an_ordinary_failure"]) == 1
    assert any("device-side assert" in message for message in failures["test_lost"])
