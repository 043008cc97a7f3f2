"""Lines of all batches together: number, bytes and turns."""

from __future__ import annotations

import asyncio

import pytest

from loraplex_services.gateway.batches import pace as pace_module
from loraplex_services.gateway.batches.pace import Pace


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)


async def test_tenants_get_free_slots_in_rotation() -> None:
    room = 0
    pace = Pace(lambda: room)
    order: list[str] = []

    async def line(tenant: str) -> None:
        await pace.acquire(tenant, 1)
        order.append(tenant)

    tasks = [asyncio.create_task(line(tenant)) for tenant in "aaaaaaaaab"]
    await settled()
    assert order == ["a", "a"], "two are ahead of the room"
    for _ in range(3):
        pace.release(1)
        await settled()
    assert "b" in order and len(order) == 5, "most of a wait for b"
    room = 10
    await asyncio.wait_for(asyncio.gather(*tasks), 5)


@pytest.mark.hostile
async def test_large_lines_wait_for_memory_and_small_ones_pass_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two large lines that took long held up the batch jobs of all tenants."""
    monkeypatch.setattr(pace_module, "MAX_BATCH_BYTES_IN_FLIGHT", 10)
    monkeypatch.setattr(pace_module, "MAX_SMALL_MESSAGE_BYTES", 1)
    pace = Pace(lambda: 100)
    await pace.acquire("a", 50)  # one always runs
    large = [asyncio.create_task(pace.acquire(tenant, 6)) for tenant in "abc"]
    await settled()
    assert not any(task.done() for task in large)
    for tenant in "ab":
        await asyncio.wait_for(pace.acquire(tenant, 1), 5)
    pace.release(50)
    await asyncio.wait_for(large[0], 5)
    pace.release(6)
    await asyncio.wait_for(large[1], 5)
    large[2].cancel()
    await asyncio.gather(large[2], return_exceptions=True)
    pace.release(6)
    await asyncio.wait_for(pace.acquire("d", 10), 5)


async def test_a_line_that_pauses_lets_others_run_and_comes_back() -> None:
    pace = Pace(lambda: -1)  # one at a time
    await pace.acquire("a", 1)
    entered, leaves = asyncio.Event(), asyncio.Event()

    async def pausing() -> None:
        async with pace.paused("a"):
            entered.set()
            await leaves.wait()

    task = asyncio.create_task(pausing())
    await entered.wait()
    await asyncio.wait_for(pace.acquire("b", 1), 5)
    leaves.set()
    await settled()
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    # Both hold their place now, whatever happened to the pause.
    pace.release(1)
    pace.release(1)
    await asyncio.wait_for(pace.acquire("c", 1), 5)
