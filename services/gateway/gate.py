"""Where requests wait for admission: the pure queue, a clock and one future per waiting request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from loraplex.errors import LoraplexError
from services.gateway.adaptive import GradientLimit, updated
from services.gateway.admission import (
    AdmissionLimits,
    AdmissionQueue,
    Ticket,
    Verdict,
    too_late,
)
from services.gateway.clock import now_s
from services.gateway.metrics import REJECTIONS, RUNNING, RUNNING_LIMIT, WAITING

LEAST_RUNNING = 256
"""The adaptive limit never falls below so many sequences: one worker's batch."""


class Place:
    """What a request holds while it runs; tells the queue how far it has come."""

    def __init__(self, gate: Gate, ticket: Ticket) -> None:
        self._gate = gate
        self._ticket = ticket
        self._start_s = now_s()
        self._first_s = 0.0
        self._num_tokens = 0

    def served(self, num_tokens: int) -> None:
        """Tokens were generated."""
        if not num_tokens:
            return
        if not self._num_tokens:
            self._first_s = now_s()
        self._num_tokens += num_tokens
        self._gate.served(self._ticket, num_tokens)

    def held_s(self) -> float:
        """Seconds since it was entered."""
        return now_s() - self._start_s

    def token_s(self) -> float:
        """Mean seconds between the tokens of one of its sequences; 0 = too few to say."""
        gaps = self._num_tokens / self._ticket.cost - 1
        return (now_s() - self._first_s) / gaps if gaps >= 8 else 0.0


class Gate:
    """Lets requests in as the admission queue decides."""

    def __init__(
        self, limits: AdmissionLimits, room_ahead: Callable[[], float] = lambda: math.inf
    ) -> None:
        """`room_ahead()`: prompt tokens the workers take ahead of their first token, together."""
        self._queue = AdmissionQueue(limits)
        self._room_ahead = room_ahead
        self._adaptive = GradientLimit.starting(
            min(LEAST_RUNNING, limits.max_running), limits.max_running
        )
        self._turns: dict[int, asyncio.Future[None]] = {}

    @property
    def num_running(self) -> int:
        """Sequences past admission."""
        return self._queue.num_running

    @property
    def num_waiting(self) -> int:
        """Requests waiting for admission."""
        return self._queue.num_waiting

    @property
    def expected_wait_s(self) -> float:
        """What a new request would wait here."""
        return self._queue.expected_wait_s() if self._queue.num_waiting else 0.0

    @asynccontextmanager
    async def place(self, ticket: Ticket) -> AsyncGenerator[Place]:
        """Wait for a place and hold it. Raises: ResourceExhausted, DeadlineExceeded."""
        await self._enter(ticket)
        place = Place(self, ticket)
        try:
            yield place
        finally:
            self._learn(place.token_s())
            self._queue.release(ticket, place.held_s())
            self._call_ready()

    def served(self, ticket: Ticket, num_tokens: int) -> None:
        """A running request generated tokens; its first ones make room for another."""
        self._queue.charge(ticket, num_tokens)
        if self._queue.first_token(ticket) and self._queue.num_waiting:
            self._call_ready()

    def room_changed(self) -> None:
        """Workers came or went: `room_ahead` may say something new."""
        self._call_ready()

    def _learn(self, token_s: float) -> None:
        if token_s > 0:
            self._adaptive = updated(self._adaptive, token_s, self._queue.num_running)
            self._queue.max_running = self._adaptive.whole

    async def _enter(self, ticket: Ticket) -> None:
        try:
            self._queue.max_ahead_tokens = self._room_ahead()
            if self._queue.offer(ticket, now_s()) is Verdict.WAIT:
                await self._turn(ticket)
        except LoraplexError as error:
            REJECTIONS.labels(error.reason).inc()
            raise
        finally:
            self._publish()

    async def _turn(self, ticket: Ticket) -> None:
        turn = self._turns[ticket.number] = asyncio.get_running_loop().create_future()
        self._publish()
        try:
            async with asyncio.timeout(ticket.deadline_s - now_s()):
                await turn
        except BaseException as error:
            self._leave_queue(ticket, turn)
            if isinstance(error, TimeoutError):
                raise too_late() from None
            raise
        finally:
            del self._turns[ticket.number]

    def _leave_queue(self, ticket: Ticket, turn: asyncio.Future[None]) -> None:
        """The client left, or its turn came in the very moment it did."""
        if turn.done() and not turn.cancelled():
            self._queue.release(ticket, 0.0)
            self._call_ready()
        else:
            self._queue.withdraw(ticket)

    def _call_ready(self) -> None:
        self._queue.max_ahead_tokens = self._room_ahead()
        for ticket in self._queue.take_ready():
            self._turns[ticket.number].set_result(None)
        self._publish()

    def _publish(self) -> None:
        RUNNING.set(self._queue.num_running)
        RUNNING_LIMIT.set(self._queue.max_running)
        WAITING.set(self._queue.num_waiting)
