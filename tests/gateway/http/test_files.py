"""/v1/files with the official client, and forms that nobody should send."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import AsyncOpenAI

from loraplex.v1 import registry_pb2
from loraplex_services.common import limits
from loraplex_services.gateway.batches import files
from loraplex_services.gateway.http import multipart
from tests.gateway.conftest import Stack

LINES = b'{"custom_id": "a"}\n' * 3
MONTH_S = 30 * 24 * 3600


@pytest.fixture
async def storing(stack: Stack) -> Stack:
    """A stack whose gateway has an object store."""
    stack.objects_url = (stack.folder / "objects").as_uri()
    return stack


def stored(stack: Stack) -> list[Path]:
    """All objects of files."""
    root = stack.folder / "objects" / "files"
    return [path for path in root.rglob("*") if path.is_file()]


async def uploaded(client: AsyncOpenAI, content: bytes = LINES, **fields: Any) -> Any:
    return await client.files.create(file=("in.jsonl", content), purpose="batch", **fields)


async def test_a_file_is_created_read_listed_and_deleted(storing: Stack) -> None:
    await storing.start()
    client = storing.openai()
    made = await uploaded(client)
    assert (made.bytes, made.filename, made.purpose) == (len(LINES), "in.jsonl", "batch")
    assert made.expires_at == made.created_at + MONTH_S
    assert abs(made.created_at - time.time()) < 60
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == LINES
    assert [each async for each in await client.files.list()] == [made]
    assert (await client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        await client.files.retrieve(made.id)
    assert caught.value.code == "file_not_found" and caught.value.param == "file_id"
    assert stored(storing) == []


async def test_a_file_of_many_segments_comes_back_whole(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SEGMENT_BYTES", 1000)
    await storing.start()
    client = storing.openai()
    for num_bytes in (999, 1000, 1001, 200_000):
        content = bytes(i * 7 % 251 for i in range(num_bytes))
        made = await uploaded(client, content)
        assert (await client.files.content(made.id)).content == content


async def test_lists_are_pages_in_either_order(storing: Stack) -> None:
    await storing.start()
    client = storing.openai()
    made = []
    for _ in range(5):
        made.append((await uploaded(client)).id)
        await asyncio.sleep(0.002)  # ids sort by milliseconds
    newest = [each.id async for each in await client.files.list(limit=2)]
    assert newest == made[::-1]
    page = await client.files.list(limit=2, order="asc", after=made[0])
    assert [each.id for each in page.data] == made[1:3] and page.has_more
    assert (await client.files.list(purpose="batch_output")).data == []
    with pytest.raises(openai.BadRequestError) as caught:
        await client.files.list(limit=0)
    assert caught.value.param == "limit"


async def test_an_expired_file_is_gone(storing: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await storing.start()
    client = storing.openai()
    made = await uploaded(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == made.created_at + 3600
    monkeypatch.setattr(time, "time", lambda: made.expires_at + 1.0)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(made.id)
    assert (await client.files.list()).data == []


@pytest.mark.parametrize(
    ("purpose", "lifetime", "param"),
    [
        ("fine-tune", None, "purpose"),
        ("batch", {"anchor": "created_at", "seconds": 3599}, "expires_after.seconds"),
        ("batch", {"anchor": "created_at", "seconds": MONTH_S + 1}, "expires_after.seconds"),
        ("batch", {"anchor": "last_active_at", "seconds": 3600}, "expires_after.anchor"),
        ("batch", {"anchor": "created_at", "days": 3}, "expires_after.days"),
    ],
)
async def test_what_is_not_served_is_refused_by_name_and_not_kept(
    storing: Stack, purpose: Any, lifetime: Any, param: str
) -> None:
    await storing.start()
    fields = {} if lifetime is None else {"expires_after": lifetime}
    with pytest.raises(openai.BadRequestError) as caught:
        await storing.openai().files.create(file=("f", LINES), purpose=purpose, **fields)
    assert caught.value.param == param
    assert stored(storing) == []


async def test_tenants_see_only_their_own_files(storing: Stack) -> None:
    storing.wants_keys = True
    storing.registry.keys |= readers("ours", "theirs")
    await storing.start(ready=False)
    ours = storing.openai().with_options(api_key=token("ours"))
    theirs = storing.openai().with_options(api_key=token("theirs"))
    made = await uploaded(ours)
    assert [each.id for each in (await ours.files.list()).data] == [made.id]
    assert (await theirs.files.list()).data == []
    for attempt in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
        with pytest.raises(openai.NotFoundError):
            await attempt(made.id)
    with pytest.raises(openai.AuthenticationError):
        await uploaded(storing.openai().with_options(api_key="none"))
    assert (await ours.files.content(made.id)).content == LINES


def token(name: str) -> str:
    return f"lpx_{name.ljust(12, '0')}_{'s' * 43}"


def readers(*tenants: str) -> dict[str, registry_pb2.Key]:
    """A key of each tenant, by its token."""
    return {
        token(name): registry_pb2.Key(tenant=name, key_id=name, scopes=["reader"])
        for name in tenants
    }


async def test_an_id_is_no_path(storing: Stack) -> None:
    await storing.start()
    async with httpx.AsyncClient(base_url=storing.url) as client:
        for file_id in ("..%2F..%2Fkeys", "file-" + "%2e" * 26, "file-" + "A" * 26, "x" * 5000):
            assert (await client.get(f"/v1/files/{file_id}")).status_code == 404


async def test_a_gateway_without_objects_says_what_to_set(stack: Stack) -> None:
    await stack.start()
    with pytest.raises(openai.NotFoundError, match="LORAPLEX_OBJECTS"):
        await uploaded(stack.openai())


async def test_a_tenant_stores_no_more_than_its_quota(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_STORED_FILE_BYTES_PER_TENANT", 2 * len(LINES) + 1)
    await storing.start()
    client = storing.openai()
    first = await uploaded(client)
    await uploaded(client)
    with pytest.raises(openai.RateLimitError) as caught:
        await uploaded(client)
    assert caught.value.code == "file_quota_exceeded"
    await client.files.delete(first.id)
    monkeypatch.setattr(files, "MAX_FILES_PER_TENANT", 1)
    with pytest.raises(openai.RateLimitError):
        await uploaded(client)


HEAD = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
PURPOSE = b'\r\n--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch'
TYPE = "multipart/form-data; boundary=b"
FORM = {"content-type": TYPE}


async def test_a_file_over_the_limit_is_refused_while_it_comes(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(multipart, "MAX_FILE_BYTES", 1 << 20)
    await storing.start()
    answer = await answer_to_part(storing, 1 << 40, HEAD + b"x" * (1 << 16))
    assert answer.startswith(b"HTTP/1.1 400") and b"body_too_large" in answer, answer
    # This one does not say how long it is, and never ends.
    chunk = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
    answer = await answer_to_part(storing, None, b"%x\r\n%b\r\n" % (len(HEAD), HEAD) + chunk * 17)
    assert answer.startswith(b"HTTP/1.1 400") and b"body_too_large" in answer, answer
    assert stored(storing) == []


async def answer_to_part(stack: Stack, declared: int | None, part: bytes) -> bytes:
    """What the gateway answers to a body of which only a part was sent."""
    length = "transfer-encoding: chunked" if declared is None else f"content-length: {declared}"
    head = ("POST /v1/files HTTP/1.1", "host: localhost", f"content-type: {TYPE}", length, "", "")
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.running.http_port)
    writer.write("\r\n".join(head).encode() + part)
    try:
        return await reader.read(1 << 16)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({"content-type": "application/json"}, b"{}", "invalid_request"),
        ({"content-type": "multipart/form-data"}, HEAD, "invalid_request"),
        ({"content-type": f"multipart/form-data; boundary={'b' * 999}"}, HEAD, "invalid_form"),
        (FORM, b"no form", "invalid_form"),
        (FORM, b"", "invalid_request"),
        (FORM, HEAD + b"cut off", "invalid_form"),
        (FORM, HEAD + PURPOSE + b"\r\n--b--", "invalid_request"),
        (FORM, HEAD + b"x" + PURPOSE * 20 + b"\r\n--b--", "invalid_form"),
        (FORM, HEAD + b"x\r\n" + HEAD + b"x" + PURPOSE + b"\r\n--b--", "invalid_request"),
        (FORM, HEAD + b"x" + PURPOSE + b"h" * 9000 + b"\r\n--b--", "invalid_request"),
        (FORM, b"--b\r\n" + b"x-a: b\r\n" * 5000 + b"\r\n", "invalid_form"),
        (FORM, PURPOSE.strip() + b"\r\n--b--", "invalid_request"),
    ],
)
async def test_hostile_forms_are_refused_and_leave_nothing(
    storing: Stack, headers: dict[str, str], body: bytes, code: str
) -> None:
    await storing.start()
    async with httpx.AsyncClient(base_url=storing.url) as client:
        answer = await client.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == code, answer.text
    assert stored(storing) == []


async def test_the_file_may_come_before_its_purpose(storing: Stack) -> None:
    await storing.start()
    body = HEAD + LINES + PURPOSE + b"\r\n--b--\r\n"
    async with httpx.AsyncClient(base_url=storing.url) as client:
        answer = await client.post("/v1/files", content=body, headers=FORM)
        assert answer.status_code == 200, answer.text
        content = await client.get(f"/v1/files/{answer.json()['id']}/content")
    assert content.content == LINES
    assert content.headers["content-disposition"] == "attachment"


async def test_a_client_that_stops_sending_leaves_nothing(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(multipart, "MAX_FILE_IDLE_S", 0.2)
    await storing.start()
    answer = await answer_to_part(storing, 100_000, HEAD + b"x" * 5000)
    assert b" 504 " in answer.partition(b"\r\n")[0], answer
    assert stored(storing) == []


def test_the_limits_leave_bytes_for_uploads() -> None:
    memory = limits.MAX_FILE_UPLOADS * 2 * files.SEGMENT_BYTES
    assert memory <= 256 << 20
