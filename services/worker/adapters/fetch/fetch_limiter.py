"""Whose turn it is to be fetched, where more is asked for than is fetched at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turns:
    """At most `limit` at a time: first what somebody still needs, in the order of asking.

    What nobody needs any more has its turn after all others. After a flood whose clients have gone
    those who ask now would wait behind it otherwise, go as well, and so on for ever.
    """

    def __init__(self, limit: int, is_needed: Callable[[str], bool]) -> None:
        self._num_free = limit
        self._is_needed = is_needed
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def of(self, digest: str) -> AsyncIterator[None]:
        """Wait for the turn of a digest, which nobody else waits for, and hold it."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(digest)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, digest: str) -> None:
        turn = self._waiting[digest] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(digest, None) is None:
                self._pass_on()  # it was given just before
            raise

    def _pass_on(self) -> None:
        needed = (digest for digest in self._waiting if self._is_needed(digest))
        if (digest := next(needed, next(iter(self._waiting), None))) is None:
            self._num_free += 1
        else:
            self._waiting.pop(digest).set_result(None)
