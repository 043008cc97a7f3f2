"""What several callers want is done once, and goes on when one of them leaves."""

from __future__ import annotations

import asyncio

import pytest

from loraplex_services.common.shared_work import SharedWork


async def test_callers_of_one_key_share_the_work_and_one_that_leaves_does_not_end_it() -> None:
    shared: SharedWork[str, int] = SharedWork()
    go, begun = asyncio.Event(), []

    async def work() -> int:
        begun.append(len(begun))
        await go.wait()
        return len(begun)

    leaving, staying = (asyncio.create_task(shared.wait("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    go.set()
    assert await staying == 1
    assert await shared.wait("a", work) == 2


async def test_a_failure_reaches_those_who_wait_and_the_next_caller_tries_again() -> None:
    shared: SharedWork[str, int] = SharedWork()

    async def fail() -> int:
        raise ValueError("first")

    async def succeed() -> int:
        return 7

    with pytest.raises(ValueError, match="first"):
        await shared.wait("a", fail)
    await asyncio.sleep(0)
    assert await shared.wait("a", succeed) == 7


async def test_closing_cancels_what_is_in_progress() -> None:
    shared: SharedWork[str, None] = SharedWork()
    task = shared.begin("a", asyncio.Event().wait)  # type: ignore[arg-type]  # never set
    await asyncio.sleep(0)
    await shared.close()
    assert task.cancelled()
