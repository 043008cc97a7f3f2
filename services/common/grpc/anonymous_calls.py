"""Bounds the calls without a key that wait for their clients.

Health checks and reflection need no key. Such a call takes about 20 KB until its client has sent
the request and has read the answer, and nothing makes a client do either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from loraplex.errors import DeadlineExceeded
from loraplex_services.common.limits import MAX_OPEN_STREAMS

Context = grpc.aio.ServicerContext[Any, Any]


class AnonymousCalls:
    """Calls without a key whose request or answer is on its way, the oldest first.

    If there are too many, the oldest one ends. The client of an ordinary health check takes
    milliseconds, so that its call does not become the oldest.
    """

    def __init__(self, close_connection: Callable[[str], None]) -> None:
        """`close_connection` closes that of a peer, by gRPC's name of it."""
        self._close_connection = close_connection
        self._waiting: dict[Context, asyncio.Timeout | None] = {}
        """What ends the wait for a request; None for an answer."""

    async def request(self, context: Context) -> Any:
        """The message of a call, or EOF. Raises: DeadlineExceeded."""
        try:
            async with asyncio.timeout(None) as wait:
                self._add(context, wait)
                return await context.read()
        except TimeoutError:
            raise DeadlineExceeded("the request did not arrive in time") from None
        finally:
            self._waiting.pop(context, None)

    def answer(self, context: Context) -> None:
        """Count the current call until gRPC has sent what its handler returns."""
        task = asyncio.current_task()
        assert task is not None, "gRPC calls handlers in tasks"
        self._add(context, None)
        task.add_done_callback(lambda _: self._waiting.pop(context, None))

    def _add(self, context: Context, wait: asyncio.Timeout | None) -> None:
        if len(self._waiting) >= MAX_OPEN_STREAMS:
            self._end_oldest()
        self._waiting[context] = wait

    def _end_oldest(self) -> None:
        """gRPC sends a status only after the answer, so that a call whose client does not read can
        end only with its connection."""
        context = next(iter(self._waiting))
        wait = self._waiting.pop(context)
        if wait is None:
            self._close_connection(context.peer())
        else:
            wait.reschedule(asyncio.get_running_loop().time())
