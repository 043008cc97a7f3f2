"""Batches many small requests into few round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class RequestBatcher(Generic[A, R]):
    """Sends the requests that arrive during a round trip together, as the next one.

    A single request is sent almost immediately. Under load each round trip carries all requests
    that arrived during the one before, so that they share its cost. An answer always belongs to a
    round trip that began after `ask` was called, and is therefore never stale.
    """

    def __init__(
        self, ask_all: Callable[[Sequence[A]], Awaitable[Sequence[R]]], max_questions: int
    ) -> None:
        """`ask_all` returns one answer for each of at most `max_questions`, in order."""
        self._ask_all = ask_all
        self._max_questions = max_questions
        self._waiting: list[tuple[A, asyncio.Future[R]]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, question: A) -> R:
        """The answer to one request. Raises what `ask_all` raised for its batch."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._gather()
                batch = self._waiting[: self._max_questions]
                del self._waiting[: self._max_questions]
                await self._ask(batch)
        finally:
            self._running = None

    async def _gather(self) -> None:
        """Wait for more requests as long as every iteration of the event loop brings some."""
        seen = 0
        while seen < len(self._waiting) < self._max_questions:
            seen = len(self._waiting)
            await asyncio.sleep(0)

    async def _ask(self, batch: list[tuple[A, asyncio.Future[R]]]) -> None:
        wanted = [(question, answer) for question, answer in batch if not answer.cancelled()]
        try:
            found = await self._ask_all([question for question, _ in wanted])
        except BaseException as error:
            for _, answer in wanted:
                if not answer.done():
                    answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, answer), value in zip(wanted, found, strict=True):
            if not answer.done():
                answer.set_result(value)
