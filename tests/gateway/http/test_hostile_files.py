"""Files and batches of a tenant that wants the memory, the disk or the time of all others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import AsyncOpenAI

from loraplex_services.common.grpc import call_rates
from loraplex_services.common.limits import CALL_BURST, LIST_CALLS
from loraplex_services.gateway.batches import book, files, run, runner
from loraplex_services.gateway.batches.storage import Storage
from loraplex_services.gateway.http import app
from loraplex_services.gateway.http import files as endpoints
from tests.gateway.conftest import Stack
from tests.gateway.http.test_files import readers, stored, token, uploaded

pytestmark = pytest.mark.hostile
MIB = 1 << 20
BATCH: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
ENDED = ("completed", "cancelled", "expired", "failed")


@pytest.fixture
async def storing(stack: Stack) -> Stack:
    """A stack whose gateway has an object store."""
    stack.objects_url = (stack.folder / "objects").as_uri()
    return stack


async def ended(client: AsyncOpenAI, file_id: str) -> Any:
    """A batch of a file, at its end."""
    return await at_its_end(client, await client.batches.create(input_file_id=file_id, **BATCH))


async def at_its_end(client: AsyncOpenAI, batch: Any) -> Any:
    """The batch at its end."""
    async with asyncio.timeout(30):
        while batch.status not in ENDED:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def test_a_page_of_another_site_uploads_no_files(storing: Stack) -> None:
    await storing.start()
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"{}")}}
    async with httpx.AsyncClient(base_url=storing.url, timeout=30) as client:
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
            sent = await client.post("/v1/files", headers={"sec-fetch-site": site}, **form)
            assert sent.status_code == status
        assert len((await client.get("/v1/files")).json()["data"]) == 1
        other = {"sec-fetch-site": "cross-site"}
        cancelled = await client.post("/v1/batches/batch_none/cancel", headers=other)
        assert cancelled.status_code == 403


async def test_downloads_that_nobody_reads_are_few_and_hold_little(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "MAX_FILE_DOWNLOADS_PER_TENANT", 1)
    await storing.start()
    made = await uploaded(storing.openai(), bytes(20 * MIB))
    async with (
        httpx.AsyncClient(base_url=storing.url, timeout=60) as client,
        AsyncExitStack() as stack,
    ):
        path = f"/v1/files/{made.id}/content"
        await stack.enter_async_context(client.stream("GET", path))
        others = [asyncio.create_task(client.get(path)) for _ in range(3)]
        # One may wait. The first answers are refusals, because nobody reads the download.
        done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        assert {each.result().status_code for each in done} == {429}
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    kept = files.Files(Storage(storing.objects_url))
    record = await kept.get("default", made.id)
    assert max([len(chunk) async for chunk in kept.read(record)]) <= MIB


@pytest.mark.parametrize("digits", ["9" * 5000, "²", "-1", "0x10", ""])
async def test_a_number_that_is_none_is_an_invalid_request(storing: Stack, digits: str) -> None:
    await storing.start()
    lifetime = {"expires_after[anchor]": "created_at", "expires_after[seconds]": digits}
    async with httpx.AsyncClient(base_url=storing.url) as client:
        form = {"purpose": "batch", **lifetime}
        parameters = {"limit": digits}
        answers = [
            await client.get("/v1/files", params=parameters),
            await client.get("/v1/batches", params=parameters),
            await client.get("/v1/models", params=parameters),
            await client.get("/console/adapters", params={"page": digits}),
            await client.post("/v1/files", files={"file": ("f", b"{}")}, data=form),
        ]
    assert [answer.status_code for answer in answers] == [400] * len(answers)
    assert stored(storing) == []


async def test_a_tenant_whose_files_are_many_runs_no_batch(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await storing.start()
    client = storing.openai()
    made = await uploaded(client, b"{}\n")
    assert (await ended(client, made.id)).status == "completed"
    monkeypatch.setattr(files, "MAX_STORED_FILE_BYTES_PER_TENANT", 3)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.batches.create(input_file_id=made.id, **BATCH)
    assert caught.value.code == "file_quota_exceeded"


async def test_a_batch_whose_results_exceed_the_quota_ends_and_keeps_them(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large answers to small requests filled the disk of everybody, at 100 jobs of a tenant."""
    monkeypatch.setattr(run, "RENEW_S", 0.02)
    await storing.start()
    client = storing.openai()
    line = '{"custom_id":"%d","method":"POST","url":"/v1/completions"}\n'
    made = await uploaded(client, "".join(line % index for index in range(3000)).encode())
    monkeypatch.setattr(files, "MAX_STORED_FILE_BYTES_PER_TENANT", made.bytes + 1000)
    batch = await ended(client, made.id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["file_quota_exceeded"]
    assert 0 < batch.request_counts.failed < batch.request_counts.total
    content = (await client.files.content(batch.error_file_id)).content
    assert content.count(b"missing_body") == batch.request_counts.failed
    assert content.count(b"batch_failed") == 3000 - batch.request_counts.failed


async def test_a_batch_that_begins_after_its_tenant_has_reached_the_quota_sends_nothing(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    monkeypatch.setattr(runner, "MAX_RUNNING_BATCHES_PER_TENANT", 0)
    await storing.start()
    client = storing.openai()
    made = await uploaded(client, b"{}\n")
    batch = await client.batches.create(input_file_id=made.id, **BATCH)
    monkeypatch.setattr(files, "MAX_STORED_FILE_BYTES_PER_TENANT", made.bytes)
    monkeypatch.setattr(runner, "MAX_RUNNING_BATCHES_PER_TENANT", 1)
    batch = await at_its_end(client, batch)
    assert [error.code for error in batch.errors.data] == ["file_quota_exceeded"]
    assert batch.request_counts.failed == 0 and batch.error_file_id


async def test_only_the_newest_batches_of_a_tenant_are_kept(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "MAX_BATCHES_PER_TENANT", 2)
    await storing.start()
    client = storing.openai()
    made = await uploaded(client, b"{}\n")
    batches = [await ended(client, made.id) for _ in range(4)]
    kept = [each.id for each in (await client.batches.list()).data]
    assert kept == [each.id for each in batches[:1:-1]]


async def test_calls_that_look_at_many_files_count_as_many(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    storing.wants_keys = True
    storing.registry.keys |= readers("many", "few")
    await storing.start(ready=False)
    many = storing.openai().with_options(api_key=token("many"), max_retries=0)
    few = storing.openai().with_options(api_key=token("few"))
    folder = storing.folder / "objects" / "files" / "many" / "documents"
    await uploaded(many)
    [document] = folder.iterdir()
    for number in range(CALL_BURST - LIST_CALLS):
        (folder / f"file-{number:026d}.json").hardlink_to(document)
    monkeypatch.setattr(app, "OBJECTS_PER_CALL", 1)
    monkeypatch.setattr(call_rates, "CALLS_PER_S", 1e-6)
    monkeypatch.setattr(call_rates, "REFUSAL_DELAY_S", 0.0)
    for _ in range(2):
        assert len((await few.files.list()).data) == 0
    with pytest.raises(openai.RateLimitError) as caught:
        await many.files.list(limit=1)
    assert caught.value.code == "too_many_calls"
