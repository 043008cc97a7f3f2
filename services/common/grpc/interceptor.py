"""Wraps every gRPC handler: identifies the caller, enforces limits and maps exceptions to statuses.

The caller is checked before its message is received, and the message's size before it is parsed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from loraplex.api.error_wire import to_status
from loraplex.errors import (
    InvalidRequest,
    LoraplexError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unsupported,
)
from loraplex_services.common.callers import (
    LOCAL,
    Auth,
    Caller,
    current_caller,
    note_read,
    peer_names,
)
from loraplex_services.common.grpc.anonymous_calls import AnonymousCalls
from loraplex_services.common.grpc.call_rates import CallCost, CallRates, DelayedRefusals
from loraplex_services.common.grpc.large_messages import LargeMessages
from loraplex_services.common.grpc.open_calls import OpenCalls
from loraplex_services.common.grpc.waiting_calls import WaitingCalls
from loraplex_services.common.limits import MAX_OPEN_STREAMS, check_message, limits_of
from loraplex_services.common.security.wrong_keys import current_peer, peer_of_grpc

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_OPEN_TO_ALL = ("/grpc.health.", "/grpc.reflection.")
_ENDLESS = frozenset(
    {"/loraplex.v1.AdminService/MirrorRequests", "/loraplex.v1.RegistryService/WatchAdapters"}
)
"""Streams that end only when their caller leaves. Its key may be revoked or expire before that."""
_CHECK_AGAIN_S = 1.0
"""How often the key of such a caller is checked."""
_END = object()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Checks the caller and the limits, then maps errors to statuses, for all shapes of methods.

    LoraplexError becomes the status of the code table. Anything else becomes INTERNAL: its
    traceback is logged here and its message is not sent.
    """

    def __init__(
        self, auth: Auth | None, open_calls: OpenCalls, waiting_calls: WaitingCalls
    ) -> None:
        rates = CallRates()
        refusals = DelayedRefusals(rates)
        self._waiting_calls = waiting_calls
        self._shared = _Shared(
            auth,
            open_calls,
            waiting_calls,
            rates,
            refusals,
            LargeMessages(),
            AnonymousCalls(waiting_calls.close),
        )
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        """Handlers of methods, made when first called."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        self._waiting_calls.take()
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None:
            return None
        if method not in self._wrapped:
            is_open = method.startswith(_OPEN_TO_ALL)
            wrap = _open_to_all if is_open else _rewrapped
            self._wrapped[method] = wrap(handler, method, self._shared)
        return self._wrapped[method]


def _text_metadata(entries: Any) -> dict[str, str]:
    return {key: value for key, value in entries or () if isinstance(value, str)}


def _rewrapped(handler: Any, method: str, shared: _Shared) -> grpc.RpcMethodHandler[Any, Any]:
    """Wrap the behaviour of a handler.

    gRPC receives and parses the request of a unary method before it calls the handler. Every
    method is therefore registered as one that reads its requests itself, and as raw bytes.
    """
    call = _Call(method, shared, handler.request_deserializer)
    reads_stream = handler.request_streaming
    if handler.response_streaming:
        inner = handler.unary_stream or handler.stream_stream
        return _reading(handler, _wrapped_stream(inner, call, reads_stream=reads_stream))
    inner = handler.unary_unary or handler.stream_unary
    return _reading(handler, _wrapped_unary(inner, call, reads_stream=reads_stream))


def _reading(handler: Any, behaviour: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that reads its requests itself."""
    serializer = handler.response_serializer
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(behaviour, response_serializer=serializer)
    return grpc.stream_unary_rpc_method_handler(behaviour, response_serializer=serializer)


def _open_to_all(handler: Any, method: str, shared: _Shared) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for a method that needs no key. Its calls are counted, because unauthenticated
    callers may open them."""
    call = _Call(method, shared, handler.request_deserializer)
    anonymous = shared.anonymous_calls

    async def answered(_: Any, context: Context) -> Any:
        async with _status_of_failure(method, context):
            request = call.parsed(call.present(await anonymous.request(context)))
            anonymous.answer(context)
            return await handler.unary_unary(request, context)

    async def streamed(_: Any, context: Context) -> None:
        async with _status_of_failure(method, context):
            if handler.request_streaming:
                request, inner = _Requests(call, context), handler.stream_stream
            else:
                request = call.parsed(call.present(await anonymous.request(context)))
                inner = handler.unary_stream
            with shared.opened(method):
                if inspect.isasyncgenfunction(inner):
                    async for response in inner(request, context):
                        await context.write(response)
                else:
                    await inner(request, context)

    return _reading(handler, streamed if handler.response_streaming else answered)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The state that all methods of one server share."""

    auth: Auth | None
    open_calls: OpenCalls
    waiting_calls: WaitingCalls
    rates: CallRates
    refusals: DelayedRefusals
    large: LargeMessages
    anonymous_calls: AnonymousCalls
    num_open: Counter[str] = field(default_factory=Counter)
    """Streams of methods that need no key, by method."""

    @contextmanager
    def opened(self, method: str) -> Iterator[None]:
        """Count such a stream while it is open. Raises ResourceExhausted if there are too many."""
        if self.num_open[method] >= MAX_OPEN_STREAMS:
            why = f"{MAX_OPEN_STREAMS} calls of {method} are open, which is the limit"
            raise ResourceExhausted(why, reason="TOO_MANY_CALLS", retry_after_s=1.0)
        self.num_open[method] += 1
        try:
            yield
        finally:
            self.num_open[method] -= 1


@dataclass(frozen=True, slots=True)
class _Call:
    """The parts that the wrappers of one method need."""

    method: str
    shared: _Shared
    parse: Callable[[bytes], Any]

    @asynccontextmanager
    async def admitted(self, context: Context) -> AsyncIterator[None]:
        """Check who calls and how often, and count the call in the meantime. Refusals of callers
        who send too much are raised with a delay."""
        caller = None
        try:
            caller = await _identify(self.method, self.shared.auth, context)
            if caller.scopes:
                self.shared.waiting_calls.trust(context.peer())
            _until_sent(self.shared.open_calls.counted(self.method, caller))
            num_calls = limits_of(self.method).num_calls
            await self.shared.rates.wait(caller, num_calls)
            if num_calls:
                note_read.set(CallCost(self.shared.rates, caller, num_calls).add)
            yield
        except Exception as error:
            is_counted = limits_of(self.method).num_calls > 0
            await self.shared.refusals.delay(error, None if is_counted else caller)
            raise

    def parsed(self, raw: bytes) -> Any:
        """Raises: ResourceExhausted for a large message, InvalidRequest for a malformed one."""
        check_message(self.method, len(raw))
        try:
            return self.parse(raw)
        except DecodeError:
            raise InvalidRequest(f"the message is not a request of {self.method}") from None

    def present(self, raw: Any) -> bytes:
        """Returns what was read. Raises: InvalidRequest if the client sent no message."""
        if raw is grpc.aio.EOF:
            raise InvalidRequest(f"{self.method} needs a request message")
        return cast(bytes, raw)

    async def only_request(self, context: Context) -> Any:
        """The request of a unary method. Raises: InvalidRequest if there is none."""
        raw = self.present(await context.read())
        await self.shared.large.wait(current_caller.get(), len(raw))
        return self.parsed(raw)


def _until_sent(counted: AbstractContextManager[None]) -> None:
    """Hold a count until the current call has ended. gRPC sends the answer of a unary method after
    its handler, in the same task, and waits for the client to read it."""
    stack, task = ExitStack(), asyncio.current_task()
    assert task is not None, "gRPC calls handlers in tasks"
    stack.enter_context(counted)
    task.add_done_callback(lambda _: stack.close())


class _Requests:
    """The requests of a stream, parsed one at a time."""

    def __init__(self, call: _Call, context: Context) -> None:
        self._call = call
        self._context = context

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        raw = await self._context.read()
        if raw is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._call.parsed(raw)


def _wrapped_unary(
    inner: Any, call: _Call, *, reads_stream: bool
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def behaviour(_: Any, context: Context) -> Any:
        async with _status_of_failure(call.method, context), call.admitted(context):
            if reads_stream:
                return await inner(_Requests(call, context), context)
            return await inner(await call.only_request(context), context)

    return behaviour


def _wrapped_stream(
    inner: Any, call: _Call, *, reads_stream: bool
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    if not inspect.isasyncgenfunction(inner):
        raise TypeError(f"{call.method}: streaming handlers must be async generator functions")

    async def behaviour(_: Any, context: Context) -> AsyncIterator[Any]:
        async with _status_of_failure(call.method, context), call.admitted(context):
            stream = _Requests(call, context)
            request = stream if reads_stream else await call.only_request(context)
            async with aclosing(inner(request, context)) as responses:
                if call.method in _ENDLESS and call.shared.auth is not None:
                    responses = _while_identified(responses, call, context)
                async for response in responses:
                    yield response

    return behaviour


async def _while_identified(
    responses: AsyncIterator[Any], call: _Call, context: Context
) -> AsyncIterator[Any]:
    """Yield responses until the caller's key ends. While that cannot be checked, because Redis or
    the registry is unavailable, the stream continues.

    Raises: Unauthenticated or PermissionDenied, as a new call of the caller would.
    """
    following: asyncio.Task[Any] | None = None
    try:
        while True:
            following = following or asyncio.create_task(_next_or_end(responses))
            await asyncio.wait([following], timeout=_CHECK_AGAIN_S)
            try:
                await _identify(call.method, call.shared.auth, context)
            except (Unauthenticated, PermissionDenied):
                raise
            except LoraplexError:
                pass
            if following.done():
                response, following = following.result(), None
                if response is _END:
                    return
                yield response
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        del following  # it may hold an exception, see `_status_of_failure`


async def _next_or_end(responses: AsyncIterator[Any]) -> Any:
    return await anext(responses, _END)


async def _identify(method: str, auth: Auth | None, context: Context) -> Caller:
    """Identify the caller. Mutates the context variables that auth and handlers read, within the
    call's own task."""
    peer_names.set(_names_shown(context))
    current_peer.set(peer_of_grpc(context.peer()))
    caller = LOCAL
    if auth is not None:
        caller = await auth.check(method, _text_metadata(context.invocation_metadata()))
    current_caller.set(caller)
    return caller


def _names_shown(context: Context) -> tuple[str, ...]:
    """Alternative names and common name of the caller's certificate."""
    shown: Mapping[str, Iterable[bytes]] = context.auth_context()
    keys = ("x509_subject_alternative_name", "x509_common_name")
    return tuple(name.decode(errors="replace") for key in keys for name in shown.get(key, ()))


@asynccontextmanager
async def _status_of_failure(method: str, context: Context) -> AsyncIterator[None]:
    """End the call with the status of what is raised within.

    `abort` sends nothing but the status, as clients with a retry policy need it. The state of the
    call keeps the exception that it raises. With a traceback or a cause, that would refer to this
    state again, and the call would be kept until Python collects such cycles. To gRPC it is open
    until then, and with 256 open calls, a connection gets no more. No local variable may hold an
    exception here either.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        status = _status_of(error, method)
        metadata = tuple(status.trailing_metadata or ())
        try:
            await context.abort(status.code, status.details or "", metadata)
        except grpc.aio.AbortError as aborted:  # gRPC raises it again once the handler returns
            aborted.__traceback__ = aborted.__context__ = None


def _status_of(error: Exception, method: str) -> grpc.Status:
    if isinstance(error, NotImplementedError):
        error = Unsupported(f"{method} is not served by this version; call one that is newer")
    if not isinstance(error, LoraplexError):
        logger.error("call failed", exc_info=error, extra={"method": method})
        error = LoraplexError("internal error: the server's log has the traceback")
    return to_status(error)
