"""The queue between a worker's session and the reader of one request.

A reader that is slower than the engine receives several steps as one event. If many requests stream
at the same time, or if the gateway is late, readers are woken less often and receive more each
time, because a message to a client costs nearly the same with one token as with ten. The readers of
one step are woken one after another, each in its own iteration of the event loop, so that a new
request need not wait for all of them. First and last tokens are never delayed. Each tenant has an
equal part of the messages, so the many streams of one tenant do not delay the tokens of another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from loraplex.api.output import joined_experts
from loraplex.errors import LoraplexError
from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.request import Tokens

_FREE_LAG_S = 0.002
"""Longest delay of a reader, in seconds, on a gateway that keeps up."""
_GATHER_PER_LAG = 4.0
_MESSAGE_S = 8e-5
"""Approximate processor time of one message to a client."""
_MOST_GATHER_S = 0.05


class WakeupPacer:
    """Decides how often the readers of one gateway are woken."""

    __slots__ = ("_due", "_lag_s", "_num_streams")

    def __init__(self) -> None:
        self._num_streams: NonzeroCounter[str] = NonzeroCounter()
        """Open streams of each tenant."""
        self._lag_s = 0.0
        """Moving mean of the seconds that tokens wait for a reader that was woken."""
        self._due: deque[TokenStream] = deque()
        """Streams whose readers are due."""

    def opened(self, tenant: str) -> None:
        """Count an open stream of a tenant."""
        self._num_streams[tenant] += 1

    def closed(self, tenant: str) -> None:
        """Count a closed stream of a tenant."""
        self._num_streams.remove(tenant)

    def gather_s(self, tenant: str) -> float:
        """The least number of seconds between two wake-ups of one reader of a tenant.

        Messages to all readers then take half of a core, of which each tenant has an equal part. A
        gateway that is late anyway wakes them less often still.
        """
        gather_s = 2.0 * _MESSAGE_S * self._num_streams[tenant] * len(self._num_streams)
        late_s = self._lag_s - _FREE_LAG_S
        return min(max(gather_s, late_s * _GATHER_PER_LAG), _MOST_GATHER_S)

    def observe(self, lag_s: float) -> None:
        """Record how long tokens waited, capped so that one slow client does not dominate."""
        self._lag_s += 0.02 * (min(lag_s, _MOST_GATHER_S) - self._lag_s)

    def wake_soon(self, stream: TokenStream) -> None:
        """Wake a reader after those that were due before it."""
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
        "_error",
        "_is_due",
        "_pacer",
        "_put_s",
        "_ready",
        "_taken_s",
        "_timer",
        "_waiter",
        "_woken_s",
        "cancel",
        "tenant",
    )

    def __init__(
        self, cancel: Callable[[], None], pacer: WakeupPacer | None = None, tenant: str = ""
    ) -> None:
        """`cancel` tells the worker to stop; it may be called more than once."""
        self.cancel = cancel
        self.tenant = tenant
        self._pacer = pacer if pacer is not None else WakeupPacer()
        self._put_s = self._taken_s = self._woken_s = 0.0
        """When the oldest waiting event came, the reader last took events, and was last woken."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        """True while the pacer will wake the reader."""
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
        """End the stream after the waiting events; only the first error counts."""
        self._error = self._error or error
        self.wake()

    async def next(self) -> Tokens:
        """All events since the last call, merged into one; waits if there is none.

        Raises: the LoraplexError the stream failed with.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._taken_s = now_s()
        self._pacer.observe(self._taken_s - max(self._put_s, self._woken_s))
        batch, self._ready = self._ready, []
        return batch[0] if len(batch) == 1 else merged(batch)

    def wake(self) -> None:
        """Wake the reader."""
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
        wait_s = self._taken_s + self._pacer.gather_s(self.tenant) - now_s()
        if wait_s > 0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.wake)
        else:
            self._is_due = True
            self._pacer.wake_soon(self)


def merged(batch: list[Tokens]) -> Tokens:
    """Consecutive events of one sequence as one event."""
    first, last = batch[0], batch[-1]
    prompts = (event.prompt_logprobs for event in batch)
    return Tokens(
        token_ids=tuple(i for event in batch for i in event.token_ids),
        position=first.position,
        logprobs=tuple(entry for event in batch for entry in event.logprobs),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        prompt_logprobs=next((p for p in prompts if p is not None), None),
        cached_tokens=max(event.cached_tokens for event in batch),
        timings=last.timings,
        worker_id=last.worker_id,
        digests=last.digests,
        pooled=last.pooled,
        routed_experts=joined_experts(event.routed_experts for event in batch),
    )
