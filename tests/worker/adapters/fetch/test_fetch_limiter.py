"""The limit of concurrent fetches, and the order of those that wait."""

from __future__ import annotations

import asyncio

from loraplex_services.worker.adapters.fetch.fetch_limiter import FetchLimiter


class Fetches:
    """Fetches that wait for a slot, hold it until they are ended, and may be cancelled."""

    def __init__(self, limit: int) -> None:
        self.needed: set[str] = set()
        self.limiter = FetchLimiter(limit, lambda digest: digest in self.needed)
        self.served: list[str] = []
        self._done = {name: asyncio.Event() for name in "abcdef"}

    def start(self, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._hold(name))

    async def end(self, name: str) -> None:
        self._done[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _hold(self, name: str) -> None:
        async with self.limiter.slot(name):
            self.served.append(name)
            await self._done[name].wait()


async def test_fetches_that_no_request_needs_wait_for_all_others() -> None:
    fetches = Fetches(limit=1)
    fetches.needed = {"c", "d"}
    for name in "abcd":
        fetches.start(name)
    await fetches.settle()
    assert fetches.served == ["a"]
    for name in "acdb":
        await fetches.end(name)
    assert fetches.served == ["a", "c", "d", "b"]


async def test_a_cancelled_fetch_neither_takes_a_slot_nor_keeps_one() -> None:
    fetches = Fetches(limit=2)
    tasks = {name: fetches.start(name) for name in "abcdef"}
    await fetches.settle()
    tasks["c"].cancel()
    await fetches.end("a")
    assert fetches.served == ["a", "b", "d"]
    fetches._done["b"].set()
    await asyncio.sleep(0)
    tasks["e"].cancel()  # just as it is granted the slot
    await fetches.settle()
    assert fetches.served == ["a", "b", "d", "f"]
    await fetches.end("d")
    await fetches.end("f")
    fetches.start("a")
    fetches.start("b")
    await fetches.settle()
    assert fetches.served[4:] == ["a", "b"], "both slots are free again"
