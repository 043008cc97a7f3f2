"""A gateway whose adapters change."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.gateway.conftest import Stack
from tests.gateway.http.live import by_version


@pytest.fixture
async def live(stack: Stack) -> AsyncIterator[Stack]:
    """Two adapters, of which `policy` will be updated, on a worker that takes its time."""
    stack.workers[0].script = by_version
    stack.workers[0].step_s = 0.01
    stack.registry.put("policy", 1)
    stack.registry.put("other", 1)
    await stack.start()
    yield stack
