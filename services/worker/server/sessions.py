"""Sessions of gateways: the running requests of each, and the events to send to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from loraplex.errors import LoraplexError, ResourceExhausted
from loraplex_services.common.telemetry.tracing import Span
from loraplex_services.worker.types.messages import Failure, TokenOutput

MAX_UNREAD = 10_000
"""Number of messages that a gateway may leave unread before its session is ended."""


@dataclass(slots=True)
class ServerRequest:
    """The session, counts and times of a `WorkerRequest`; made by the API server process."""

    session: GatewaySession
    request_id: str
    """The gateway's id of the request."""
    digests: tuple[str, ...]
    num_prompt: int
    arrival_s: float
    crash_key: bytes = b""
    """Its key in `CrashGuard`."""
    has_entered: bool = False
    """True once the engine has begun to compute it."""
    grammar_check: asyncio.Task[None] | None = None
    """Checks its grammar before the engine gets it."""
    first_token_s: float | None = None
    """When its first token passed through the API server."""
    last_token_s: float | None = None
    """When its latest token passed through."""
    num_output: int = 0
    """Tokens that it has generated here."""
    first_step: int = 0
    """The engine's step that chose its first token."""
    span: Span = field(default_factory=Span)


@dataclass(slots=True)
class SessionUpdate:
    """The part of one step's output that belongs to one session; ids are the gateway's."""

    step: int
    tokens: list[tuple[str, TokenOutput]] = field(default_factory=list)
    failures: list[tuple[str, LoraplexError]] = field(default_factory=list)


class GatewaySession:
    """One stream. `next` yields at most one `SessionUpdate` a step."""

    def __init__(self, session_id: int, gateway_id: str) -> None:
        self.session_id = session_id
        self.gateway_id = gateway_id
        self.live: dict[str, str] = {}
        """The engine's request ids by the gateway's."""
        self._updates: asyncio.Queue[SessionUpdate | LoraplexError | None] = asyncio.Queue()
        self._is_ended = False
        self._is_closing = False

    @property
    def num_unread(self) -> int:
        """Messages that the gateway has not read yet."""
        return self._updates.qsize()

    def push(self, update: SessionUpdate) -> None:
        """Queue events. A reader that falls too far behind ends the session."""
        if self.num_unread >= MAX_UNREAD:
            self.end(ResourceExhausted("too many unread messages", reason="SLOW_READER"))
        elif not self._is_ended:
            self._updates.put_nowait(update)

    def end(self, error: LoraplexError) -> None:
        """End the stream with `error`, after the queued events."""
        if not self._is_ended:
            self._is_ended = True
            self._updates.put_nowait(error)

    def no_more_requests(self) -> None:
        """Note that the gateway has closed its direction: the stream ends with the last running
        request."""
        self._is_closing = True
        if not self.live:
            self._updates.put_nowait(None)

    async def next(self) -> SessionUpdate | None:
        """The next events; None when the stream is over. Raises the error given to `end`."""
        if self._is_closing and not self.live and self._updates.empty():
            return None
        update = await self._updates.get()
        if isinstance(update, LoraplexError):
            raise update
        return update


class ServerRequests:
    """All live requests of all sessions, by the engine's request id."""

    def __init__(self) -> None:
        self._by_key: dict[str, ServerRequest] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[ServerRequest]:
        """The requests, oldest first."""
        return iter(self._by_key.values())

    def add(self, request: ServerRequest) -> str:
        """Register a request. Returns the id under which the engine knows it."""
        key = f"{request.session.session_id}/{request.request_id}"
        self._by_key[key] = request
        request.session.live[request.request_id] = key
        return key

    def get(self, key: str) -> ServerRequest | None:
        """The request with this id; None if it has ended."""
        return self._by_key.get(key)

    def remove(self, key: str) -> ServerRequest | None:
        """Forget a request; None when it had ended."""
        request = self._by_key.pop(key, None)
        if request is not None:
            request.session.live.pop(request.request_id, None)
        return request

    def clear(self) -> list[ServerRequest]:
        """Forget everything; returns what was live."""
        requests = list(self._by_key.values())
        for key in list(self._by_key):
            self.remove(key)
        return requests

    def sort_out(
        self, step: int, tokens: list[TokenOutput], failures: list[Failure]
    ) -> dict[GatewaySession, SessionUpdate]:
        """One step's outputs by session. Outputs of requests that have ended are dropped."""
        updates: dict[GatewaySession, SessionUpdate] = {}
        for output in tokens:
            if (request := self._by_key.get(output.request_id)) is not None:
                part = updates.get(request.session)
                if part is None:
                    part = updates[request.session] = SessionUpdate(step)
                part.tokens.append((request.request_id, output))
        for failure in failures:
            if (request := self._by_key.get(failure.request_id)) is not None:
                part = updates.setdefault(request.session, SessionUpdate(step))
                part.failures.append((request.request_id, failure.error.to_error()))
        return updates
