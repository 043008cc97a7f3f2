"""`Idempotency-Key`: a request that is sent again runs once, and both senders read one answer.

The first request with a key runs on a task of its own and its response is kept; another with the
same key and body follows that response from its beginning, live or when it is over. A key stands
for one caller, path and body. Answers are kept in this process only, for a while and up to a size;
failures are not kept, so that trying again tries again. When nobody reads any more the request is
cancelled, but not at once: who lost a connection comes back.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.errors import Conflict, InvalidRequest, LoraplexError, codes_of
from services.common.callers import Caller
from services.gateway.clock import now_s
from services.gateway.openai.errors import error_body, error_headers
from services.gateway.openai.guard import read_capped
from services.gateway.openai.sse import until_gone

HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
KEPT_S = 600.0
"""After its end."""
KEPT_BYTES = 64 << 20
"""Of all answers together; beyond it the oldest are forgotten."""
ABANDONED_S = 10.0
"""A request that nobody has read for so long is cancelled."""
_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, eq=False)
class _Answer:
    """One response, growing while it runs."""

    fingerprint: bytes
    """Of path and body."""
    messages: list[Message] = field(default_factory=list)
    num_bytes: int = 0
    is_over: bool = False
    ended_s: float = 0.0
    num_readers: int = 0
    error: BaseException | None = None
    task: asyncio.Task[None] | None = None
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, message: Message) -> None:
        """Another message came."""
        self.messages.append(message)
        self.num_bytes += len(message.get("body", b""))
        self.tell()

    def tell(self) -> None:
        """Wake whoever waits for more."""
        self.grown.set()
        self.grown = asyncio.Event()

    @property
    def is_good(self) -> bool:
        """True for a response that ended as it should."""
        if not self.is_over or self.error is not None or len(self.messages) < 2:
            return False
        if self.messages[0].get("status") != 200:
            return False
        headers = Headers(raw=list(self.messages[0].get("headers", [])))
        streams = headers.get("content-type", "").startswith("text/event-stream")
        return not streams or bool(self.messages[-1].get("body", b"").endswith(_DONE))


class Idempotency:
    """ASGI middleware for POSTs that carry a key."""

    def __init__(self, app: ASGIApp, caller: Callable[[Request], Awaitable[Caller]]) -> None:
        """`caller` says who asks; raises Unauthenticated, PermissionDenied."""
        self._app = app
        self._caller = caller
        self._answers: dict[tuple[str, str], _Answer] = {}
        """By tenant and key, the oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, or follow the one that ran."""
        key = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            answer, is_new = await self._answer(scope, receive, key)
        except LoraplexError as error:
            await _refuse(send, error)
            return
        answer.num_readers += 1
        try:
            with suppress(ClientDisconnect):
                await until_gone(receive, _follow(answer, send, is_new))
        finally:
            answer.num_readers -= 1
            if not answer.num_readers and not answer.is_over:
                asyncio.get_running_loop().call_later(ABANDONED_S, _give_up, answer)

    async def _answer(self, scope: Scope, receive: Receive, key: str) -> tuple[_Answer, bool]:
        """The answer of a key, and whether it was begun here. Raises: LoraplexError."""
        if not 0 < len(key) <= MAX_KEY_CHARS:
            raise InvalidRequest.field(HEADER, key, f"must have 1 to {MAX_KEY_CHARS} characters")
        request = Request(scope, receive)
        place = ((await self._caller(request)).tenant, key)
        body = await read_capped(request)
        fingerprint = hashlib.sha256(scope["path"].encode() + b"\0" + body).digest()
        self._forget_old()
        known = self._answers.get(place)
        if known is not None and (known.is_good or not known.is_over):
            if known.fingerprint != fingerprint:
                raise Conflict(
                    f"this {HEADER} was used for another request; use a new one for a new request",
                    reason="IDEMPOTENCY_KEY_REUSED",
                )
            return known, False
        answer = self._answers[place] = _Answer(fingerprint)
        answer.task = asyncio.create_task(self._run(scope, body, answer))
        return answer, True

    async def _run(self, scope: Scope, body: bytes, answer: _Answer) -> None:
        """Run the request into its answer. Mutates: answer."""
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await answer.abandoned.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            answer.add(message)

        try:
            await self._app(scope, receive, send)
        except Exception as error:
            answer.error = error
        finally:
            answer.is_over, answer.ended_s = True, now_s()
            answer.tell()

    def _forget_old(self) -> None:
        oldest_s, num_bytes = now_s() - KEPT_S, 0
        for place, answer in reversed(list(self._answers.items())):
            num_bytes += answer.num_bytes
            if answer.is_over and (
                not answer.is_good or answer.ended_s < oldest_s or num_bytes > KEPT_BYTES
            ):
                num_bytes -= answer.num_bytes
                del self._answers[place]


async def _follow(answer: _Answer, send: Send, is_new: bool) -> None:
    """Send everything from the beginning to the end. Raises: what the request raised."""
    num_sent = 0
    while True:
        grown = answer.grown
        while num_sent < len(answer.messages):
            message = answer.messages[num_sent]
            num_sent += 1
            if message["type"] == "http.response.start" and not is_new:
                replayed = (b"idempotent-replayed", b"true")
                message = {**message, "headers": [*message.get("headers", []), replayed]}
            await send(message)
        if answer.is_over:
            break
        await grown.wait()
    if answer.error is not None:
        raise answer.error


def _give_up(answer: _Answer) -> None:
    if not answer.num_readers:
        answer.abandoned.set()


async def _refuse(send: Send, error: LoraplexError) -> None:
    headers = {"content-type": "application/json", **error_headers(error)}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": codes_of(error).http, "headers": raw})
    await send({"type": "http.response.body", "body": error_body(error)})
