"""Limits how many adapters are fetched at the same time, and orders the waiting ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class FetchLimiter:
    """Allows `limit` fetches at a time, in the order of requests.

    Fetches that no live request needs any more come last. Otherwise those that a burst of cancelled
    requests left behind would delay the fetches of live ones.
    """

    def __init__(self, limit: int, is_needed: Callable[[str], bool]) -> None:
        self._num_free = limit
        self._is_needed = is_needed
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def slot(self, digest: str) -> AsyncIterator[None]:
        """Wait until `digest` may be fetched, and count it as a fetch in the meantime.

        At most one caller at a time may wait for a digest."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(digest)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, digest: str) -> None:
        granted = self._waiting[digest] = asyncio.get_running_loop().create_future()
        try:
            await granted
        except asyncio.CancelledError:
            if self._waiting.pop(digest, None) is None:
                self._pass_on()  # granted just before
            raise

    def _pass_on(self) -> None:
        needed = (digest for digest in self._waiting if self._is_needed(digest))
        if (digest := next(needed, next(iter(self._waiting), None))) is None:
            self._num_free += 1
        else:
            self._waiting.pop(digest).set_result(None)
