"""After some errors of a GPU, such as a failed assertion in a kernel, nothing works any more in the
process: all its further tests would fail. With pytest-xdist, the process ends instead, and another
one runs the rest. The test counts as failed twice, by its own report and by the end of the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

LOST = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and _is_lost():
        item.config.stash[LOST] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if item.config.stash.get(LOST, False) and hasattr(item.config, "workerinput"):
        os._exit(1)
    return result


def _is_lost() -> bool:
    """Whether the GPU that this process uses answers with errors only."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
