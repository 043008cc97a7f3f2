"""Large bodies of one tenant leave memory and the event loop to others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from loraplex.errors import DeadlineExceeded, InvalidRequest
from loraplex_services.common.callers import ALL_SCOPES, LOCAL, Caller
from loraplex_services.common.grpc.large_messages import LargeMessages
from loraplex_services.common.limits import MAX_LARGE_BODIES_PER_TENANT, MAX_SMALL_MESSAGE_BYTES
from loraplex_services.gateway.http import json_body
from loraplex_services.gateway.http.json_body import MAX_BODY_BYTES, LargeBodies, read_json

pytestmark = pytest.mark.hostile

ACME, GLOBEX = (Caller(tenant, f"{tenant}-key", ALL_SCOPES) for tenant in ("acme", "globex"))


class Sender:
    """A client whose body arrives when `is_sending` is set."""

    def __init__(self, body: bytes, declared: int | None = None) -> None:
        self.body = body
        self.declared = len(body) if declared is None else declared
        self.is_sending = asyncio.Event()
        self.is_read = False

    def request(self, bodies: LargeBodies) -> Request:
        headers = [(b"content-type", b"application/json")]
        if self.declared >= 0:
            headers.append((b"content-length", str(self.declared).encode()))
        scope = {"type": "http", "headers": headers, "state": {"large_bodies": bodies}}
        return Request(scope, self._receive)

    async def _receive(self) -> Any:
        self.is_read = True
        await self.is_sending.wait()
        return {"type": "http.request", "body": self.body, "more_body": False}


def large() -> bytes:
    return json.dumps({"prompt": "x" * (MAX_SMALL_MESSAGE_BYTES + 1)}).encode()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def bodies() -> LargeBodies:
    return LargeBodies()


async def test_large_bodies_of_one_tenant_are_read_few_at_a_time_and_small_ones_at_once(
    bodies: LargeBodies,
) -> None:
    senders = [Sender(large()) for _ in range(MAX_LARGE_BODIES_PER_TENANT + 3)]
    tasks = [asyncio.create_task(read_json(s.request(bodies), GLOBEX)) for s in senders]
    await _settle()
    assert sum(sender.is_read for sender in senders) == MAX_LARGE_BODIES_PER_TENANT
    small, other = Sender(b'{"a": 1}'), Sender(large())
    for sender in (small, other):
        sender.is_sending.set()
    assert await read_json(small.request(bodies), GLOBEX) == {"a": 1}
    assert await read_json(other.request(bodies), ACME)
    for sender in senders:
        sender.is_sending.set()
    assert len(await asyncio.gather(*tasks)) == len(senders)


async def test_after_a_large_body_of_a_tenant_its_next_one_waits_and_those_of_others_do_not() -> (
    None
):
    bodies = LargeBodies(LargeMessages(share=1e-9))

    async def read(caller: Caller, body: bytes) -> dict[str, Any]:
        sender = Sender(body)
        sender.is_sending.set()
        return await read_json(sender.request(bodies), caller)

    assert await read(GLOBEX, large())
    later = asyncio.create_task(read(GLOBEX, large()))
    await _settle()
    assert await read(ACME, large()) and await read(GLOBEX, b"{}") == {}
    await _settle()
    assert not later.done()
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)


async def test_without_keys_large_bodies_do_not_wait() -> None:
    bodies = LargeBodies(LargeMessages(share=1e-9))
    for _ in range(2):
        assert await bodies.parse(large(), LOCAL)


async def test_a_body_that_trickles_is_given_up(
    bodies: LargeBodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "MAX_BODY_S", 0.05)
    with pytest.raises(DeadlineExceeded, match="took longer"):
        await read_json(Sender(large()).request(bodies), GLOBEX)
    with pytest.raises(DeadlineExceeded):
        await read_json(Sender(b"{}").request(bodies), GLOBEX)
    with pytest.raises(DeadlineExceeded):
        await read_json(Sender(b"{}", declared=-1).request(bodies), GLOBEX)


@pytest.mark.parametrize("declared", [None, -1])
async def test_a_body_beyond_the_limit_is_refused(
    bodies: LargeBodies, declared: int | None
) -> None:
    sender = Sender(b" " * (MAX_BODY_BYTES + 1), declared)
    sender.is_sending.set()
    with pytest.raises(InvalidRequest) as caught:
        await read_json(sender.request(bodies), GLOBEX)
    assert caught.value.reason == "BODY_TOO_LARGE"
    assert caught.value.message.endswith("8388608 bytes; send less in one request")


@pytest.mark.parametrize("value", [b"{}", b"[]", b"1", b'{"a":1}', b'""'])
async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(
    bodies: LargeBodies, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    monkeypatch.setattr(json_body, "parse_object", None)
    values = (value + b",") * ((MAX_BODY_BYTES - 100) // (len(value) + 1))
    sender = Sender(b'{"prompt": [' + values + value + b"]}")
    sender.is_sending.set()
    with pytest.raises(InvalidRequest) as caught:
        await read_json(sender.request(bodies), GLOBEX)
    assert caught.value.reason == "BODY_TOO_COMPLEX"


async def test_as_many_token_ids_as_a_long_context_has_are_read(bodies: LargeBodies) -> None:
    ids = list(range(1 << 19))
    sender = Sender(json.dumps({"prompt": ids}).encode())
    sender.is_sending.set()
    assert (await read_json(sender.request(bodies), ACME))["prompt"] == ids
