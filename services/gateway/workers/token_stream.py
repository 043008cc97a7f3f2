"""The queue between a worker's session and the reader of one request.

A reader that is slower than the engine finds several steps waiting and takes them as one. Where
many stream at once, or the whole gateway is late, readers are woken less often, so that each finds
more: a message to a client costs nearly the same whether it carries one token or ten. A step wakes
its readers one after another, each in a turn of the event loop, so that a new request need not wait
for all of them. First and last tokens never wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from loraplex.errors import LoraplexError
from services.gateway.event_loop import now_s
from services.gateway.request import Tokens

_FREE_LAG_S = 0.002
"""Readers run this late on a gateway that keeps up."""
_GATHER_PER_LAG = 4.0
_MESSAGE_S = 8e-5
"""Processor time of one message to a client, roughly."""
_MOST_GATHER_S = 0.05


class Pace:
    """How often the readers of one gateway are woken."""

    __slots__ = ("_due", "_lag_s", "num_streams")

    def __init__(self) -> None:
        self.num_streams = 0
        """Open at this gateway."""
        self._lag_s = 0.0
        """Moving mean of the time that tokens wait for a reader that may take them."""
        self._due: deque[TokenStream] = deque()
        """Streams whose readers are woken next."""

    @property
    def gather_s(self) -> float:
        """The least time between two awakenings of one reader.

        Long enough that messages to all readers take half of a core, and longer for a gateway that
        is late all the same.
        """
        gather_s = 2.0 * _MESSAGE_S * self.num_streams
        late_s = self._lag_s - _FREE_LAG_S
        return min(max(gather_s, late_s * _GATHER_PER_LAG), _MOST_GATHER_S)

    def observe(self, lag_s: float) -> None:
        """Tokens waited so long; one slow client must not count for more than a late one."""
        self._lag_s += 0.02 * (min(lag_s, _MOST_GATHER_S) - self._lag_s)

    def wake_soon(self, stream: TokenStream) -> None:
        """Wake a reader when those before it had their turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._wake_one)
        self._due.append(stream)

    def _wake_one(self) -> None:
        self._due.popleft().wake()
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake_one)


class TokenStream:
    """Events of one submitted job, in order."""

    __slots__ = (
        "_cancel",
        "_error",
        "_is_due",
        "_pace",
        "_put_s",
        "_ready",
        "_taken_s",
        "_timer",
        "_waiter",
        "_woken_s",
    )

    def __init__(self, cancel: Callable[[], None], pace: Pace | None = None) -> None:
        """`cancel` tells the worker that nobody reads on; it may be called more than once."""
        self._cancel = cancel
        self._pace = pace if pace is not None else Pace()
        self._put_s = self._taken_s = self._woken_s = 0.0
        """When the first event that waits came, events were taken last, the reader was woken."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        """The pace will wake the reader."""
        self._ready: list[Tokens] = []
        self._error: LoraplexError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, tokens: Tokens) -> None:
        """Add an event."""
        if not self._ready:
            self._put_s = now_s()
        self._ready.append(tokens)
        if tokens.finish_reason is not None:
            self.wake()
        elif self._timer is None and not self._is_due:
            self._wake_in_time()

    def fail(self, error: LoraplexError) -> None:
        """End the stream after what is waiting; a later error changes nothing."""
        self._error = self._error or error
        self.wake()

    async def next(self) -> Tokens:
        """Everything that arrived since the last call, as one event; waits when there is nothing.

        Raises: the LoraplexError the stream failed with.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._taken_s = now_s()
        self._pace.observe(self._taken_s - max(self._put_s, self._woken_s))
        batch, self._ready = self._ready, []
        return batch[0] if len(batch) == 1 else merged(batch)

    def cancel(self) -> None:
        """Nobody reads on."""
        self._cancel()

    def wake(self) -> None:
        """Let the reader go on."""
        self._is_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._woken_s = now_s()
            self._waiter.set_result(None)

    def _wake_in_time(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if not self._taken_s:
            self.wake()
            return
        wait_s = self._taken_s + self._pace.gather_s - now_s()
        if wait_s > 0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.wake)
        else:
            self._is_due = True
            self._pace.wake_soon(self)


def merged(batch: list[Tokens]) -> Tokens:
    """Consecutive events of one sequence as one event."""
    first, last = batch[0], batch[-1]
    return Tokens(
        token_ids=tuple(i for event in batch for i in event.token_ids),
        position=first.position,
        logprobs=tuple(entry for event in batch for entry in event.logprobs),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
        timings=last.timings,
        worker_id=last.worker_id,
    )
