"""Large bodies of one tenant leave memory and the event loop to others."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from starlette.requests import Request

from loraplex.errors import DeadlineExceeded, InvalidRequest
from loraplex_services.common.limits import MAX_LARGE_BODIES_PER_TENANT, MAX_SMALL_BODY_BYTES
from loraplex_services.gateway.http import json_body
from loraplex_services.gateway.http.json_body import MAX_BODY_BYTES, read_json

pytestmark = pytest.mark.hostile


class Sender:
    """A client whose body arrives when `is_sending` is set."""

    def __init__(self, body: bytes, declared: int | None = None) -> None:
        self.body = body
        self.declared = len(body) if declared is None else declared
        self.is_sending = asyncio.Event()
        self.is_read = False

    def request(self) -> Request:
        headers = [(b"content-type", b"application/json")]
        if self.declared >= 0:
            headers.append((b"content-length", str(self.declared).encode()))
        return Request({"type": "http", "headers": headers}, self._receive)

    async def _receive(self) -> Any:
        self.is_read = True
        await self.is_sending.wait()
        return {"type": "http.request", "body": self.body, "more_body": False}


def large(value: str = "x") -> bytes:
    return json.dumps({"prompt": value * (MAX_SMALL_BODY_BYTES + 1)}).encode()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_large_bodies_of_one_tenant_are_read_few_at_a_time_and_small_ones_at_once() -> None:
    senders = [Sender(large()) for _ in range(MAX_LARGE_BODIES_PER_TENANT + 3)]
    tasks = [asyncio.create_task(read_json(s.request(), "globex")) for s in senders]
    await _settle()
    assert sum(sender.is_read for sender in senders) == MAX_LARGE_BODIES_PER_TENANT
    small, other = Sender(b'{"a": 1}'), Sender(large())
    for sender in (small, other):
        sender.is_sending.set()
    assert await read_json(small.request(), "globex") == {"a": 1}
    assert await read_json(other.request(), "acme")
    for sender in senders:
        sender.is_sending.set()
    assert len(await asyncio.gather(*tasks)) == len(senders)


async def test_the_event_loop_rests_between_large_bodies() -> None:
    senders = [Sender(json.dumps({"prompt": [{}] * 300_000}).encode()) for _ in range(4)]
    for sender in senders:
        sender.is_sending.set()
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    await asyncio.gather(*(read_json(s.request(), f"tenant{n}") for n, s in enumerate(senders)))
    wall_s, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
    assert cpu_s < 0.5 * wall_s, "bodies were parsed one right after another"


async def test_a_large_body_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_LARGE_BODY_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="took longer"):
        await read_json(Sender(large()).request(), "globex")
    slow = Sender(b"{}", declared=-1)
    with pytest.raises(DeadlineExceeded):
        await read_json(slow.request(), "globex")


@pytest.mark.parametrize("declared", [None, -1])
async def test_a_body_beyond_the_limit_is_refused(declared: int | None) -> None:
    sender = Sender(b" " * (MAX_BODY_BYTES + 1), declared)
    sender.is_sending.set()
    with pytest.raises(InvalidRequest) as caught:
        await read_json(sender.request(), "globex")
    assert caught.value.reason == "BODY_TOO_LARGE"
