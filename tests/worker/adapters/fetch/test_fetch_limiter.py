"""Whose turn it is to be fetched."""

from __future__ import annotations

import asyncio

from services.worker.adapters.fetch.fetch_limiter import Turns


class Hall:
    """Digests that come, wait for their turn, hold it until told, and may give up."""

    def __init__(self, limit: int) -> None:
        self.needed: set[str] = set()
        self.turns = Turns(limit, lambda digest: digest in self.needed)
        self.served: list[str] = []
        self._done = {name: asyncio.Event() for name in "abcdef"}

    def comes(self, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._hold(name))

    async def ends(self, name: str) -> None:
        self._done[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _hold(self, name: str) -> None:
        async with self.turns.of(name):
            self.served.append(name)
            await self._done[name].wait()


async def test_what_nobody_needs_any_more_waits_for_all_others() -> None:
    hall = Hall(limit=1)
    hall.needed = {"c", "d"}
    for name in "abcd":
        hall.comes(name)
    await hall.settle()
    assert hall.served == ["a"]
    for name in "acdb":
        await hall.ends(name)
    assert hall.served == ["a", "c", "d", "b"]


async def test_who_gives_up_neither_takes_a_turn_nor_keeps_one() -> None:
    hall = Hall(limit=2)
    tasks = {name: hall.comes(name) for name in "abcdef"}
    await hall.settle()
    tasks["c"].cancel()
    await hall.ends("a")
    assert hall.served == ["a", "b", "d"]
    hall._done["b"].set()
    await asyncio.sleep(0)
    tasks["e"].cancel()  # just as it is given the turn
    await hall.settle()
    assert hall.served == ["a", "b", "d", "f"]
    await hall.ends("d")
    await hall.ends("f")
    hall.comes("a")
    hall.comes("b")
    await hall.settle()
    assert hall.served[4:] == ["a", "b"], "both turns are free again"
