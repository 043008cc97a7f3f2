"""What every test shares, and nothing of any one area: areas have a conftest.py of their own."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

# The same examples on every run, however busy the machine: a failure must be the change's.
hypothesis.settings.register_profile("seeded", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("seeded")
# Hypothesis would also parse every imported module of ours, in each process, for constants to try:
# examples would depend on which other tests run.
providers._get_local_constants = lambda: providers._local_constants


_SLOW_FIRST = (
    "worker/ops/test_triton.py",
    "worker/parity/test_parity.py",
    "worker/test_worker_process.py",
    "worker/test_rank_processes.py",
    "up/",
    "faults/",
    "registry/publish/test_crash.py",
    "e2e/",
    "demo/",
    "worker/parity/test_ranks.py",
    "worker/runner/parallel/",
    "worker/test_first_start.py",
    "worker/ops/",
    "worker/native/",
    "gateway/routing/test_failover.py",
    "gateway/admission/test_overload.py",
    "common/test_objects_contract.py",
)

_STACKS_OF_THEIR_OWN = ("failover", "kills")
"""Such files in e2e/ run anywhere; the others of `make test` share one."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, those that share what is slow to start go to one process, too."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            folder, _, name = file.rpartition("/test_")
            is_shared = folder == "tests/e2e" and name[:-3] not in _STACKS_OF_THEIR_OWN
            return folder if is_shared else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, or the last one to start would run alone for a minute."""

    def index(item: pytest.Item) -> int:
        path = item.nodeid.removeprefix("tests/")
        slow = (i for i, head in enumerate(_SLOW_FIRST) if path.startswith(head))
        return next(slow, len(_SLOW_FIRST))

    items.sort(key=index)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Without the collector of garbage: all that imports and collection make stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Spare the collector the millions of objects that imports and thousands of tests left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands and services set up the logging of their process, which in a test is everybody's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Keep torch to one thread, so that tests share small machines and add in one order.

    Torch is not imported for this: the tests of its torch-free neighbours must run without it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
