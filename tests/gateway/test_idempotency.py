"""`Idempotency-Key`: sent twice, run once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest

from loraplex.v1 import common_pb2
from services.gateway.openai import idempotency
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_worker import endless

BODY = {"model": "base", "prompt": "abc", "max_tokens": 40, "temperature": 1}


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers by lower-case name, and the body as text."""

    status: int
    headers: dict[str, str]
    text: str


async def _post(stack: Stack, key: str = "k", **fields: Any) -> Answer:
    data = json.dumps(BODY | fields).encode()
    port = stack.running.http_port
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\nidempotency-key: {key}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        start, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    lines = start.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return Answer(int(lines[0].split()[1]), headers, rest.decode())


async def test_requests_with_one_key_run_once_whether_together_or_later(stack: Stack) -> None:
    stack.workers[0].step_s = 0.01
    await stack.start()
    together = await asyncio.gather(*[_post(stack) for _ in range(3)])
    later = await _post(stack)
    assert {answer.text for answer in (*together, later)} == {later.text}
    assert later.status == 200
    assert len(stack.workers[0].requests) == 1
    replayed = [answer.headers.get("idempotent-replayed") for answer in (*together, later)]
    assert sorted(replayed, key=str) == [None, "true", "true", "true"]
    assert len({answer.headers["x-request-id"] for answer in (*together, later)}) == 4


async def test_stream_is_followed_from_its_beginning(stack: Stack) -> None:
    stack.workers[0].step_s = 0.01
    await stack.start()
    first = asyncio.create_task(_post(stack, stream=True))
    await eventually(lambda: stack.workers[0].num_tokens_sent > 3)
    second = await _post(stack, stream=True)
    assert second.text == (await first).text
    assert "data: [DONE]" in second.text
    assert len(stack.workers[0].requests) == 1


async def test_same_key_for_another_body_is_a_conflict(stack: Stack) -> None:
    await stack.start()
    await _post(stack)
    other = await _post(stack, prompt="abd")
    assert other.status == 409
    assert "idempotency_key_reused" in other.text
    assert (await _post(stack, key="k2", prompt="abd")).status == 200


async def test_failure_is_not_kept(stack: Stack) -> None:
    await stack.start()
    damaged = common_pb2.ErrorDetail(code=15, reason="DATA_LOSS", message="adapter is damaged")
    stack.workers[0].fail_next = [damaged]
    assert (await _post(stack)).status == 502
    assert (await _post(stack)).status == 200
    assert (await _post(stack, key="x" * 256)).status == 400


async def test_sender_that_comes_back_in_time_finds_its_request_still_running(stack: Stack) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.02
    await stack.start()
    sent = asyncio.create_task(_post(stack))
    await eventually(lambda: stack.workers[0].num_tokens_sent > 3)
    sent.cancel()
    await asyncio.gather(sent, return_exceptions=True)
    assert (await _post(stack)).status == 200
    assert len(stack.workers[0].requests) == 1
    assert stack.workers[0].cancelled == []


async def test_request_that_nobody_reads_any_more_is_cancelled(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "ABANDONED_S", 0.1)
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.02
    await stack.start()
    sent = asyncio.create_task(_post(stack, max_tokens=400))
    await eventually(lambda: stack.workers[0].num_tokens_sent > 3)
    sent.cancel()
    await eventually(lambda: stack.workers[0].num_live == 0)
    assert len(stack.workers[0].cancelled) == 1
