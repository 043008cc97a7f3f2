"""One shared stack with every demo adapter published; tests that break things start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.stack import ADAPTERS, DEMO, Stack, start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = start(
        tmp_path_factory.mktemp("stack") / "state",
        *("--dtype", "float32"),
        environment={"LORAPLEX_LORA_ROOT": str(DEMO / "adapters")},
    )
    try:
        running.publish(*ADAPTERS)
        yield running
    finally:
        assert running.stop() == 0
