"""Lines of a batch job: how they are sent, and what their answers hold until they are stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex_services.common.callers import Caller
from loraplex_services.gateway.batches import layout, results, sending
from loraplex_services.gateway.batches.book import BatchBook
from loraplex_services.gateway.batches.files import Files
from loraplex_services.gateway.batches.pace import Pace
from loraplex_services.gateway.batches.records import BatchRecord
from loraplex_services.gateway.batches.results import Answer
from loraplex_services.gateway.batches.sending import LineSender, RunContext
from loraplex_services.gateway.batches.storage import Storage
from loraplex_services.gateway.pipeline import collected_bytes
from loraplex_services.gateway.pipeline.collected_bytes import CollectedBytes

pytestmark = pytest.mark.hostile
PATH = "/v1/completions"
RECORD = BatchRecord("batch_a", "acme", "key", ("reader",), PATH, "file-a", 0, 3600)
ANSWER = b'{"text":"%b"}' % (b"x" * 1000)


class Endpoints:
    """Endpoints that give every line the same answer."""

    num_answers = 0

    async def parse(self, raw: bytes, caller: Caller) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.json.decode(raw)
        return fields

    async def post(
        self, caller: Caller, path: str, body: dict[str, Any], request_id: str
    ) -> Answer:
        self.num_answers += 1
        return Answer(200, ANSWER, request_id)


async def lines(num_lines: int) -> AsyncGenerator[bytes]:
    for index in range(num_lines):
        line = {"custom_id": str(index), "method": "POST", "url": PATH, "body": {}}
        yield msgspec.json.encode(line)


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    found = Storage(tmp_path.as_uri())
    yield found
    await found.close()


def sender(storage: Storage, endpoints: Endpoints, held: CollectedBytes) -> LineSender:
    files, book = Files(storage), BatchBook(storage)
    pace = Pace(lambda: 3)
    context = RunContext("g0", storage, files, book, endpoints, pace, held.unread, None)
    return LineSender(context, RECORD)


async def test_answers_that_cannot_be_stored_are_few_and_hold_little(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store was away, or slower than the answers came, 256 answers of each batch job
    waited in memory, of any size."""
    monkeypatch.setattr(collected_bytes, "MAX_COLLECTED_BYTES_PER_TENANT", 2 * len(ANSWER))
    monkeypatch.setattr(sending, "_MAX_WAIT_S", 0.01)
    monkeypatch.setattr(sending, "_STORE_RETRY_S", 0.01)
    endpoints, held = Endpoints(), CollectedBytes()
    obstacle = tmp_path / layout.results("acme", "batch_a").rstrip("/")
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()
    lines_sender = sender(storage, endpoints, held)
    sent = asyncio.create_task(lines_sender.send(lines(20), ()))
    async with asyncio.timeout(30):
        while endpoints.num_answers < 30:  # those beyond two are asked for again
            await asyncio.sleep(0.01)
        assert held._by_tenant == {"acme": 2 * len(ANSWER)}
        assert lines_sender.counts.completed == 0
        obstacle.unlink()
        await sent
    assert lines_sender.counts.completed == 20 and not held._by_tenant


async def test_an_answer_that_is_always_too_large_fails_its_line_at_once(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a line was sent again until the job expired."""
    monkeypatch.setattr(collected_bytes, "MAX_COLLECTED_BYTES_PER_TENANT", len(ANSWER) - 1)
    endpoints, held = Endpoints(), CollectedBytes()
    lines_sender = sender(storage, endpoints, held)
    await lines_sender.send(lines(2), ())
    assert (endpoints.num_answers, lines_sender.counts.failed) == (2, 2)
    store = await storage.store()
    stored = await results.stored_results(store, RECORD)
    texts = [result.text async for result in results.read_results(store, stored)]
    assert len(texts) == 2 and all(b'"code":"answer_too_large"' in text for text in texts)
