"""The event loop of simulations."""

from __future__ import annotations

import asyncio

import pytest

from tests.virtual_time import run_virtually


async def test_a_callback_that_fails_ends_the_run() -> None:
    async def wait_for_ever() -> None:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            loop.call_later(1.0, tick)

        tick()
        loop.call_later(3.0, lambda: 1 // 0)
        await loop.create_future()

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(run_virtually, wait_for_ever())
