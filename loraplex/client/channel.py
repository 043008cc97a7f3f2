"""A gRPC channel with its options, TLS and bearer token, and errors as typed exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from loraplex.allocation import reuse_large_blocks
from loraplex.api.error_wire import STATUS_LOST, from_rpc_error, has_details
from loraplex.client.settings import Credentials, check_address
from loraplex.errors import (
    InvalidRequest,
    LoraplexError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)

S = TypeVar("S")

MAX_RECEIVE_BYTES = 64 << 20
CHUNK_BYTES = 256 << 10
"""Largest number of bytes of a file in one message. Servers accept 1 MiB, but receiving it occupies
the event loop of a registry for 1.3 ms, in which all other calls wait."""
CALL_TIMEOUT_S = 60.0
_MAX_WAITS = 3
"""How many times a page of a list is requested again after a refusal with a retry hint."""

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # A new client must not inherit the reconnect back-off of an older client of the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
]


class Channel:
    """A connection to one server that is opened on first use, inside the running event loop."""

    def __init__(self, address: str, credentials: Credentials, server: str) -> None:
        """`server` is the noun for error messages: "registry" or "gateway"."""
        check_address(f"--{server}", address)
        self.address = address
        self._credentials = credentials
        self._server = server
        self._channel: grpc.aio.Channel | None = None

    def another(self) -> Channel:
        """One more connection to the same server, for the caller to close."""
        return Channel(self.address, self._credentials, self._server)

    def stub(self, make: Callable[[grpc.aio.Channel], S]) -> S:
        """A stub of the generated class `make` on this channel."""
        if self._channel is None:
            self._channel = self._opened()
        return make(self._channel)

    async def call(self, method: Any, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Make a unary call with credentials and a deadline; raises typed errors."""
        with self.typed_errors():
            return await method(request, metadata=self.metadata, timeout=timeout_s)

    async def stream(self, method: Any, request: Any) -> AsyncGenerator[Any, None]:
        """The responses of one server stream, cancelled when the caller stops listening."""
        call = method(request, metadata=self.metadata)
        try:
            with self.typed_errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def pages(self, method: Any, request: Any) -> AsyncGenerator[Any, None]:
        """All pages of a unary call that lists. Waits where a page has read so much that the server
        refuses the next one for some seconds. Mutates: request."""
        num_waits = 0
        while True:
            try:
                page = await self.call(method, request)
            except ResourceExhausted as error:
                if error.reason != "TOO_MANY_CALLS" or num_waits == _MAX_WAITS:
                    raise
                num_waits += 1
                await asyncio.sleep(error.retry_after_s or 1.0)
                continue
            num_waits = 0
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        key = self._credentials.api_key
        return (("authorization", f"Bearer {key}"),) if key else ()

    async def close(self) -> None:
        """Close the connection; calls still running fail."""
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    @contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Turn a failed call into the server's error, or Unavailable naming the address."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._typed(error) from None

    def _typed(self, error: grpc.RpcError) -> LoraplexError:
        """The typed error of a failed call. Our servers always send details; a status without them
        comes from the transport."""
        typed = from_rpc_error(error)
        if has_details(error) or typed.reason == STATUS_LOST:
            return typed
        if isinstance(typed, Unavailable):
            is_refused = "Socket closed" in typed.message and not self._credentials.uses_tls
            hint = " If it uses TLS, name its CA with --ca." if is_refused else ""
            return Unavailable(
                f"no {self._server} answers at {self.address}: is it running, and is the address "
                f"right?{hint} ({typed.message})",
                reason="UNREACHABLE",
            )
        if isinstance(typed, Unsupported):
            return Unsupported(
                f"the server at {self.address} lacks this method: is it a {self._server}, and not "
                "another or older one?"
            )
        if type(typed) is LoraplexError:
            return Unavailable(
                f"the connection to the {self._server} at {self.address} was lost: {typed.message}",
                reason="INTERRUPTED",
            )
        return typed

    def _opened(self) -> grpc.aio.Channel:
        reuse_large_blocks()
        given = self._credentials
        if not given.uses_tls:
            return grpc.aio.insecure_channel(self.address, options=OPTIONS)
        _check_files(given)
        tls = grpc.ssl_channel_credentials(
            root_certificates=given.ca.read_bytes() if given.ca else None,
            private_key=given.key.read_bytes() if given.key else None,
            certificate_chain=given.cert.read_bytes() if given.cert else None,
        )
        return grpc.aio.secure_channel(self.address, tls, options=OPTIONS)


def _check_files(given: Credentials) -> None:
    """Raises InvalidRequest for TLS files that gRPC cannot use; some of them end its process."""
    import ssl  # takes 10 ms, which commands without TLS need not wait

    if (given.cert is None) != (given.key is None):
        missing = "key" if given.key is None else "cert"
        raise InvalidRequest.field(missing, "", "a certificate and its key go together; give both")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if given.ca is not None:
            context.load_verify_locations(given.ca)
    except (ssl.SSLError, OSError) as error:
        raise _unusable("ca", given.ca, error) from None
    try:
        if given.cert is not None:
            context.load_cert_chain(given.cert, given.key, password="")
    except (ssl.SSLError, OSError) as error:
        raise _unusable("cert", given.cert, error) from None


def _unusable(field: str, path: Path | None, error: OSError) -> InvalidRequest:
    needed = "a PEM certificate" if field == "ca" else "a PEM certificate and its unencrypted key"
    why = getattr(error, "reason", None) or error.strerror or error
    return InvalidRequest.field(field, str(path), f"must be {needed} ({why})")
