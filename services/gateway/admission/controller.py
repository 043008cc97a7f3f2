"""Where requests wait for admission: the pure queue, a clock and one future per waiting request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from loraplex.errors import LoraplexError
from services.gateway.admission.dispatch_window import AheadRoom, ReadyWorkers, Room
from services.gateway.admission.queue import (
    AdmissionLimits,
    AdmissionQueue,
    Ticket,
    Verdict,
    queue_full,
    too_late,
)
from services.gateway.admission.run_times import RunPace, RunTimes
from services.gateway.event_loop import now_s
from services.gateway.metrics import REJECTIONS, RUNNING, WAITING


class Place:
    """What a request holds while it runs; tells the queue how far it has come."""

    def __init__(self, gate: Gate, ticket: Ticket, foretold: RunPace) -> None:
        self._gate = gate
        self._ticket = ticket
        self.foretold = foretold
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

    @property
    def num_tokens(self) -> float:
        """Tokens of one of its sequences, in the mean."""
        return self._num_tokens / self._ticket.cost

    def held_s(self) -> float:
        """Seconds since it was entered."""
        return now_s() - self._start_s

    def pace(self) -> RunPace | None:
        """Its first token's time, and the mean between the others of one of its sequences; None =
        too few to say, or it waited for an adapter."""
        gaps = self.num_tokens - 1
        if gaps < 8 or self._ticket.awaits_adapter:
            return None
        return RunPace(self._first_s - self._start_s, (now_s() - self._first_s) / gaps)


class Gate:
    """Lets requests in as the admission queue decides."""

    def __init__(
        self, limits: AdmissionLimits, ready: Callable[[], ReadyWorkers] | None = None
    ) -> None:
        """`ready()`: the workers that requests may be sent to; None = there is room for all."""
        self._queue = AdmissionQueue(limits)
        self._ready = ready
        self._ahead = AheadRoom()
        self._run_times = RunTimes()
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Of waiting requests, by ticket number."""
        self._out: set[int] = set()
        """Of those, the ones that no longer have a place in the queue."""

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

    def run_s(self, min_tokens: int, max_tokens: int) -> float:
        """How long a request of so many output tokens will probably run; 0 = unknown."""
        step_s = self._ready().step_s if self._ready is not None else 0.0
        return self._run_times.run_s(min_tokens, max_tokens, step_s)

    @asynccontextmanager
    async def place(self, ticket: Ticket) -> AsyncGenerator[Place]:
        """Wait for a place and hold it. Raises: ResourceExhausted, DeadlineExceeded."""
        await self._enter(ticket)
        place = Place(self, ticket, self._run_times.pace)
        try:
            yield place
            if place.num_tokens:
                self._run_times.observe_length(place.num_tokens)
        finally:
            self._learn(place)
            self._queue.release(ticket, place.held_s())
            self._call_ready()

    def served(self, ticket: Ticket, num_tokens: int) -> None:
        """A running request generated tokens; its first ones make room for another."""
        self._queue.charge(ticket, num_tokens)
        if self._queue.first_token(ticket) and self._queue.num_waiting:
            if self._ready is not None:
                self._ahead.started(ticket.ahead_tokens, now_s(), self._ready())
            self._call_ready()

    def num_running_of(self, tenant: str) -> int:
        """Sequences of one tenant past admission."""
        return self._queue.num_running_of(tenant)

    def set_share(self, tenant: str, num_places: int | None) -> None:
        """So many sequences of a tenant may run here at once; None = any number."""
        if num_places is None:
            self._queue.shares.pop(tenant, None)
        else:
            self._queue.shares[tenant] = num_places
        self._call_ready()

    def room_changed(self) -> None:
        """Workers came or went."""
        self._call_ready()

    def _learn(self, place: Place) -> None:
        if (pace := place.pace()) is not None:
            self._run_times.observe_pace(pace, place.num_tokens, place.foretold)

    async def _enter(self, ticket: Ticket) -> None:
        try:
            self._queue.room = self._room()
            if not self._queue.num_waiting:
                self._ahead.begin(now_s())
            verdict = self._queue.offer(ticket, now_s())
            self._shed()
            if verdict is Verdict.WAIT:
                await self._turn(ticket)
        except LoraplexError as error:
            REJECTIONS.labels(error.reason).inc()
            raise
        finally:
            self._publish()

    def _shed(self) -> None:
        """Refuse those that made room."""
        wait_s = self._queue.expected_wait_s()
        for ticket in self._queue.shed:
            self._out.add(ticket.number)
            turn = self._turns[ticket.number]
            if not turn.done():
                turn.set_exception(queue_full(wait_s))
        self._queue.shed.clear()

    async def _turn(self, ticket: Ticket) -> None:
        turn = self._turns[ticket.number] = asyncio.get_running_loop().create_future()
        self._publish()
        try:
            async with asyncio.timeout(ticket.start_by_s - now_s()):
                await turn
        except BaseException as error:
            self._leave_queue(ticket, turn)
            if isinstance(error, TimeoutError):
                raise too_late() from None
            raise
        finally:
            del self._turns[ticket.number]

    def _leave_queue(self, ticket: Ticket, turn: asyncio.Future[None]) -> None:
        """The client left, or its turn came in the very moment it did, or it is out already."""
        if ticket.number in self._out:
            self._out.discard(ticket.number)
        elif turn.done() and not turn.cancelled():
            self._queue.release(ticket, 0.0)
            self._call_ready()
        else:
            self._queue.withdraw(ticket)

    def _call_ready(self) -> None:
        self._queue.room = self._room()
        while started := self._queue.take_ready():
            for ticket in started:
                turn = self._turns[ticket.number]
                if turn.done():
                    # Its client has left and had no time to say so.
                    self._out.add(ticket.number)
                    self._queue.release(ticket, 0.0)
                else:
                    turn.set_result(None)
        self._publish()

    def _room(self) -> Room:
        return Room() if self._ready is None else self._ahead.room(self._ready())

    def _publish(self) -> None:
        RUNNING.set(self._queue.num_running)
        WAITING.set(self._queue.num_waiting)
