"""Channels between gateways and simulated workers: late, stalled and broken on demand.

Stands where `grpc.aio.Channel` stands, below the generated stub, with the messages themselves.
Messages of one stream arrive in order, each after a delay. A stalled worker's messages stay on
their way; when a worker dies they are lost and every stream of it breaks.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc

from loraplex.v1 import worker_pb2

Send = Callable[[Any], None]


def broken(text: str) -> grpc.aio.AioRpcError:
    """What a client sees when the other side is gone."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=text)


class Peer(Protocol):
    """A worker as the network sees it."""

    is_up: bool

    def get_model(self) -> worker_pb2.GetModelResponse: ...

    async def load_adapter(self, digest: str) -> None: ...

    def watch(self, send: Send) -> None: ...

    def open_session(self, send: Send) -> Callable[[worker_pb2.SessionRequest], None]: ...


class Way:
    """To and from one worker: how long messages take now."""

    def __init__(self, rng: random.Random, delay_s: float = 0.002) -> None:
        self._rng = rng
        self.delay_s = delay_s
        self.stalled_until_s = 0.0
        self.pipes: set[Pipe] = set()

    def delay(self) -> float:
        """Of one message."""
        return self.delay_s * self._rng.uniform(0.5, 2.0)

    def break_all(self) -> None:
        """Every stream ends at once; what is on its way is lost."""
        for pipe in list(self.pipes):
            pipe.break_off()


class Pipe:
    """One direction of one stream."""

    def __init__(self, way: Way, arrived: Send, ended: Callable[[], None]) -> None:
        self._way = way
        self._arrived = arrived
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._on_way: deque[Any] = deque()
        self._last_s = 0.0
        self.is_broken = False
        way.pipes.add(self)

    def send(self, message: Any) -> None:
        """Put a message on its way."""
        if self.is_broken:
            return
        self._last_s = max(self._last_s, self._loop.time() + self._way.delay())
        self._on_way.append(message)
        self._loop.call_at(self._last_s, self._deliver)

    def break_off(self) -> None:
        """End the stream."""
        if not self.is_broken:
            self.is_broken = True
            self._on_way.clear()
            self._way.pipes.discard(self)
            self._ended()

    def _deliver(self) -> None:
        """The oldest message arrives, whichever timer rang."""
        if self.is_broken:
            return
        if self._way.stalled_until_s > self._loop.time():
            self._loop.call_at(self._way.stalled_until_s, self._deliver)
            return
        self._arrived(self._on_way.popleft())


class _Inbox:
    """Messages that arrived and were not read."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: Any) -> None:
        self._messages.append(message)
        self._wake()

    def end(self) -> None:
        self._is_over = True
        self._wake()

    async def get(self) -> Any:
        """Raises: AioRpcError when the stream broke."""
        while not self._messages:
            if self._is_over:
                raise broken("the stream broke")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Watch:
    """A running WatchStatus."""

    def __init__(self, way: Way, worker: Peer) -> None:
        self._inbox = _Inbox()
        self._down = Pipe(way, self._inbox.put, self._inbox.end)
        if worker.is_up:
            worker.watch(self._down.send)
        else:
            self._down.break_off()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            yield await self._inbox.get()

    def cancel(self) -> None:
        self._down.break_off()


class _SessionCall:
    """A running Session."""

    def __init__(self, way: Way, worker: Peer) -> None:
        self._inbox = _Inbox()
        self._down = Pipe(way, self._inbox.put, self._end)
        self._up = Pipe(way, self._heard, self._end)
        self._worker_hears: Callable[[Any], None] | None = None
        if worker.is_up:
            self._worker_hears = worker.open_session(self._down.send)
        else:
            self._down.break_off()

    async def write(self, message: worker_pb2.SessionRequest) -> None:
        if self._up.is_broken:
            raise broken("the stream broke")
        self._up.send(message)

    async def read(self) -> Any:
        return await self._inbox.get()

    def cancel(self) -> None:
        """Both sides learn of it; the worker a little later."""
        self._down.break_off()

    def _heard(self, message: Any) -> None:
        assert self._worker_hears is not None
        self._worker_hears(message)

    def _end(self) -> None:
        self._inbox.end()
        self._down.break_off()
        self._up.break_off()
        if self._worker_hears is not None:
            self._worker_hears(None)
            self._worker_hears = None


class Channel:
    """To one worker."""

    def __init__(self, way: Way, worker: Peer) -> None:
        self._way = way
        self._worker = worker

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Awaitable[Any]]:
        """GetModel and LoadAdapter."""

        async def call(request: Any, timeout: float | None = None, metadata: Any = ()) -> Any:
            await self._crossed()
            if method.endswith("GetModel"):
                answer: Any = self._worker.get_model()
            else:
                await self._worker.load_adapter(request.digest)
                answer = worker_pb2.LoadAdapterResponse()
            await self._crossed()
            return answer

        return call

    def unary_stream(self, method: str, **_: Any) -> Callable[..., _Watch]:
        """WatchStatus; Generate is not used by gateways."""
        return lambda request, metadata=(): _Watch(self._way, self._worker)

    def stream_stream(self, method: str, **_: Any) -> Callable[..., _SessionCall]:
        """Session."""
        return lambda metadata=(): _SessionCall(self._way, self._worker)

    async def close(self, grace: float | None = None) -> None:
        """Nothing is kept."""

    async def _crossed(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(self._way.delay(), self._way.stalled_until_s - loop.time()))
        if not self._worker.is_up:
            raise broken("connection refused")
