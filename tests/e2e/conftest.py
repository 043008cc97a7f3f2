"""One shared stack with every demo adapter published; tests that break things start their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.e2e.stack import ADAPTERS, DEMO, Stack, start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    lora_root = tmp_path_factory.mktemp("lora-root")
    shutil.copytree(DEMO / "adapters", lora_root, dirs_exist_ok=True)
    shutil.copytree(DEMO / "adapters" / "upper", lora_root / "loras" / "Woof")
    running = start(
        tmp_path_factory.mktemp("stack") / "state",
        *("--dtype", "float32"),
        environment={"LORAPLEX_LORA_ROOT": str(lora_root)},
    )
    try:
        running.publish(*ADAPTERS)
        yield running
    finally:
        assert running.stop() == 0
