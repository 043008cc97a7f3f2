"""Work that is done once for all that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedWork(Generic[K, T]):
    """Work in progress, by its key."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[T]] = {}

    def begin(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """The task for a key; a new one unless it is in progress."""
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(lambda task: self._ended(key, task))
        return self._tasks[key]

    async def wait(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the task for a key. A caller that leaves does not cancel it."""
        return await asyncio.shield(self.begin(key, work))

    async def close(self) -> None:
        """Cancel all work."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: K, task: asyncio.Task[T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it
