"""Large answers whose clients do not read them, which stay in the gateway's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from loraplex_services.common.callers import ALL_SCOPES, Caller
from loraplex_services.gateway.http.guard import Guard
from loraplex_services.gateway.pipeline import collected_bytes
from loraplex_services.gateway.pipeline.collected_bytes import CollectedBytes

pytestmark = pytest.mark.hostile
SIZE = 1 << 20


class Gateway:
    """A gateway's guard around an app that gives each request the same answer."""

    def __init__(self, answer: Response) -> None:
        self._answer = answer
        self._guard = Guard(self._app, None, CollectedBytes())

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["caller"] = Caller(scope["tenant"], scope["tenant"], ALL_SCOPES)
        await self._answer(scope, receive, send)

    def asked(self, tenant: str, read: asyncio.Event) -> tuple[asyncio.Task[None], list[Message]]:
        """A request, and what was sent of its answer. The client reads on once `read` is set."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                await read.wait()

        requests = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Message:
            if (request := next(requests, None)) is None:
                await asyncio.Event().wait()  # the client stays
            assert request is not None
            return request

        scope = {"type": "http", "path": "/", "headers": [], "tenant": tenant}
        return asyncio.create_task(self._guard(scope, receive, send)), sent


def body_of(sent: list[Message]) -> bytes:
    """The body of an answer."""
    return b"".join(message.get("body", b"") for message in sent)


async def test_large_answers_that_a_tenant_does_not_read_are_limited_and_leave_others_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway kept each of them for a minute, or for as long as its client read a little."""
    monkeypatch.setattr(collected_bytes, "MAX_COLLECTED_BYTES_PER_TENANT", 2 * SIZE)
    gateway, read = Gateway(Response(bytes(SIZE))), asyncio.Event()
    asked = [gateway.asked(tenant, read) for tenant in ("acme", "acme", "acme", "globex")]
    while not all(sent[1:] for _, sent in asked):
        await asyncio.sleep(0)
    assert [sent[0]["status"] for _, sent in asked] == [200, 200, 429, 200]
    assert (b"retry-after", b"1") in asked[2][1][0]["headers"]
    assert max(len(sent[1]["body"]) for _, sent in asked) <= SIZE // 16, "parts of an answer"
    read.set()
    await asyncio.gather(*(task for task, _ in asked))
    assert body_of(asked[0][1]) == bytes(SIZE)
    task, sent = gateway.asked("acme", read)
    await task
    assert sent[0]["status"] == 200


async def test_a_download_that_is_sent_in_parts_is_not_counted_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collected_bytes, "MAX_COLLECTED_BYTES_PER_TENANT", SIZE)

    async def parts() -> AsyncGenerator[bytes]:
        yield bytes(SIZE)
        yield bytes(SIZE)

    read = asyncio.Event()
    read.set()
    answer = StreamingResponse(parts(), headers={"content-length": str(2 * SIZE)})
    task, sent = Gateway(answer).asked("acme", read)
    await task
    assert sent[0]["status"] == 200
    assert body_of(sent) == bytes(2 * SIZE)
