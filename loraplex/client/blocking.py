"""Blocking clients for scripts and notebooks, which run the async clients on a thread."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from loraplex.client.inference_client import InferenceClient
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials

P = ParamSpec("P")
T = TypeVar("T")

THREAD_NAME = "loraplex-clients"


class _LoopThread:
    """An event loop on a daemon thread, so that callers may run an event loop themselves.

    All blocking clients of a process share it. grpcio serves every event loop of a process from one
    queue, and where there are several, it logs a `BlockingIOError` whenever two of them wake up at
    the same time.
    """

    _shared: ClassVar[_LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def joined(cls) -> _LoopThread:
        """The thread, for one more client, which calls `leave` later."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._num_clients += 1
            return cls._shared

    @classmethod
    def forget(cls) -> None:
        """Start over in a child process, which has no copy of the thread."""
        cls._shared, cls._lock = None, threading.Lock()

    def leave(self) -> None:
        """End the loop and its thread if no client is left."""
        with self._lock:
            self._num_clients -= 1
            if self._num_clients or self is not _LoopThread._shared:
                return
            _LoopThread._shared = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __init__(self) -> None:
        self._num_clients = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the thread and return its result. An interrupt cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yield the items one at a time. Leaving the loop early closes the source."""

        async def step() -> tuple[T] | None:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return None

        async def close() -> None:
            await items.aclose()  # type: ignore[attr-defined]

        try:
            while (found := self.run(step())) is not None:
                yield found[0]
        finally:
            self.run(close())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LoopThread.forget)


class _Blocking:
    """One async client that runs on the thread of all blocking clients."""

    _client: Any

    def __init__(self, make: Callable[[], Any]) -> None:
        self._thread = _LoopThread.joined()
        self._is_open = True

        async def made() -> Any:
            return make()

        try:
            self._client = self._thread.run(made())
        except BaseException:
            self._thread.leave()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The client cannot be used any more."""
        if self._is_open:
            self._is_open = False
            self._thread.run(self._client.__aexit__())
            self._thread.leave()


def _call(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The blocking form of an async method, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        thread: _LoopThread = self._thread
        return thread.run(method(self._client, *args, **kwargs))

    return call


def _stream(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """The blocking form of an async generator method."""

    @functools.wraps(method)
    def stream(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        thread: _LoopThread = self._thread
        return thread.iterate(method(self._client, *args, **kwargs))

    return _shown_as_iterator(stream, method)


def _shown_as_iterator(
    stream: Callable[Concatenate[Any, P], Iterator[T]], method: Callable[..., Any]
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Set the signature that `help` shows, with an iterator in place of the asynchronous one."""
    signature = inspect.signature(method)
    returns = str(signature.return_annotation)
    for name in ("AsyncGenerator", "AsyncIterator"):
        returns = returns.replace(name, "Iterator").replace(", None]", "]")
    stream.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    return stream


class BlockingRegistry(_Blocking):
    """`RegistryClient` without async. Use as a context manager."""

    def __init__(self, address: str | None = None, credentials: Credentials | None = None) -> None:
        super().__init__(lambda: RegistryClient(address, credentials))

    upload = _call(RegistryClient.upload)
    publish = _call(RegistryClient.publish)
    check = _call(RegistryClient.check)
    get = _call(RegistryClient.get)
    pull = _call(RegistryClient.pull)
    set_tag = _call(RegistryClient.set_tag)
    rollback = _call(RegistryClient.rollback)
    delete_tag = _call(RegistryClient.delete_tag)
    tag_history = _call(RegistryClient.tag_history)
    delete = _call(RegistryClient.delete)
    usage = _call(RegistryClient.usage)
    set_sharing = _call(RegistryClient.set_sharing)
    list = _stream(RegistryClient.list)
    watch = _stream(RegistryClient.watch)


class BlockingInference(_Blocking):
    """`InferenceClient` without async. Use as a context manager."""

    def __init__(self, address: str | None = None, credentials: Credentials | None = None) -> None:
        super().__init__(lambda: InferenceClient(address, credentials))

    complete = _call(InferenceClient.complete)
    status = _call(InferenceClient.status)
    fetch = _call(InferenceClient.fetch)
    embed = _call(InferenceClient.embed)
    score = _call(InferenceClient.score)
    generate = _stream(InferenceClient.generate)
    models = _stream(InferenceClient.models)
