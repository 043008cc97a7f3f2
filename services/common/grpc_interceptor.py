"""Around every handler: who calls, and which status an exception becomes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from loraplex.errors import LoraplexError, Unsupported
from loraplex.wire_errors import to_status
from services.common.callers import LOCAL, Auth, current_caller, peer_names

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_OPEN_TO_ALL = ("/grpc.health.", "/grpc.reflection.")


class DoorInterceptor(grpc.aio.ServerInterceptor):
    """Checks the caller, then maps errors to statuses, for all four shapes of methods.

    LoraplexError becomes the status of the code table. Anything else becomes INTERNAL: its
    traceback is logged here and its message is not sent.
    """

    def __init__(self, auth: Auth | None) -> None:
        self._auth = auth
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        """Handlers of methods, made when first called."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_OPEN_TO_ALL):
            return handler
        if method not in self._wrapped:
            self._wrapped[method] = _rewrapped(handler, method, self._auth)
        return self._wrapped[method]


def _text_metadata(entries: Any) -> dict[str, str]:
    return {key: value for key, value in entries or () if isinstance(value, str)}


def _rewrapped(handler: Any, method: str, auth: Auth | None) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler with its behaviour wrapped."""
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    inner = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    wrap = _wrapped_stream if handler.response_streaming else _wrapped_unary
    return make(
        wrap(inner, method, auth),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _wrapped_unary(
    inner: Any, method: str, auth: Auth | None
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def behaviour(request: Any, context: Context) -> Any:
        try:
            await _identify(method, auth, context)
            return await inner(request, context)
        except Exception as error:
            await _abort(error, method, context)

    return behaviour


def _wrapped_stream(
    inner: Any, method: str, auth: Auth | None
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    if not inspect.isasyncgenfunction(inner):
        raise TypeError(f"{method}: streaming handlers must be async generator functions")

    async def behaviour(request: Any, context: Context) -> AsyncIterator[Any]:
        responses = inner(request, context)
        try:
            await _identify(method, auth, context)
            async for response in responses:
                yield response
        except Exception as error:
            await _abort(error, method, context)
        finally:
            await responses.aclose()

    return behaviour


async def _identify(method: str, auth: Auth | None, context: Context) -> None:
    """Mutates the context variables that auth and handlers read, within the call's own task."""
    peer_names.set(_names_shown(context))
    caller = LOCAL
    if auth is not None:
        caller = await auth.check(method, _text_metadata(context.invocation_metadata()))
    current_caller.set(caller)


def _names_shown(context: Context) -> tuple[str, ...]:
    """Alternative names and common name of the caller's certificate."""
    shown: Mapping[str, Iterable[bytes]] = context.auth_context()
    keys = ("x509_subject_alternative_name", "x509_common_name")
    return tuple(name.decode(errors="replace") for key in keys for name in shown.get(key, ()))


async def _abort(error: Exception, method: str, context: Context) -> None:
    """End the call with the status of `error`. Always raises."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError):
        error = Unsupported(f"{method} is not served by this version")
    if not isinstance(error, LoraplexError):
        logger.error("call failed", exc_info=error, extra={"method": method})
        error = LoraplexError("internal error: the server's log has the traceback")
    status = to_status(error)
    await context.abort(status.code, status.details or "", tuple(status.trailing_metadata or ()))
