"""The end of a batch job whose lines did not all get a result."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex_services.gateway.batches import results
from loraplex_services.gateway.batches.book import Step
from loraplex_services.gateway.batches.ending import delete_results, end_batch
from loraplex_services.gateway.batches.files import FileRecord, Files, new_file_id
from loraplex_services.gateway.batches.lines import Line
from loraplex_services.gateway.batches.records import (
    CANCELLED,
    CANCELLING,
    BatchError,
    BatchRecord,
    new_batch_id,
)
from loraplex_services.gateway.batches.results import Answer
from loraplex_services.gateway.batches.storage import Storage

LINES = [b'{"custom_id": "a"}', b"not JSON", b'{"custom_id": "c"}', b'{"custom_id": 7}']


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    made = Storage((tmp_path / "objects").as_uri())
    yield made
    await made.close()


class Job:
    """A cancelled batch job of `LINES`, run by nobody."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.files = Files(storage)
        self.record = BatchRecord(
            new_batch_id(), "t", "", (), "/v1/completions", new_file_id(), 0, 3600
        )
        self.record = replace(
            self.record, status=CANCELLING, ending=CANCELLED, num_lines=len(LINES)
        )

    async def upload(self) -> None:
        async def data() -> AsyncIterator[bytes]:
            yield b"\n".join(LINES)

        file_id = self.record.input_file_id
        num_bytes = await self.files.write("t", file_id, data())
        await self.files.add(FileRecord(file_id, "t", "in", "batch", num_bytes, 0, 0))

    async def answer(self, index: int) -> bool:
        store = await self._storage.store()
        line = Line(index, f"line {index}")
        result = results.answered(self.record, line, Answer(200, b"{}", "r"))
        return await results.store_result(store, self.record, line, result)

    async def refuse(self, index: int) -> None:
        store = await self._storage.store()
        line = Line(index, f"line {index}")
        result = results.refused(self.record, line, BatchError("wrong", "so"))
        await results.store_result(store, self.record, line, result)

    async def skip_others(self) -> int:
        return await results.skip_others(await self._storage.store(), self.record)

    async def end(self) -> tuple[list[Any], list[Any]]:
        """The lines of the output and of the error file."""

        async def save(step: Step) -> BatchRecord:
            self.record = step(self.record) or self.record
            return self.record

        await end_batch(self.files, await self._storage.store(), self.record, save)
        return await self._lines(self.record.output_file_id), await self._lines(
            self.record.error_file_id
        )

    async def _lines(self, file_id: str) -> list[Any]:
        if not file_id:
            return []
        record = await self.files.get("t", file_id)
        data = b"".join([chunk async for chunk in self.files.read(record)])
        return [json.loads(line) for line in data.splitlines()]


async def test_lines_that_were_skipped_are_named_in_the_order_of_the_input(
    storage: Storage,
) -> None:
    job = Job(storage)
    await job.upload()
    await job.refuse(2)
    assert await job.skip_others() == 3
    outputs, errors = await job.end()
    assert outputs == []
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("a", "batch_cancelled"),
        (None, "batch_cancelled"),
        ("line 2", "wrong"),
        (None, "batch_cancelled"),
    ]
    assert job.record.counts.failed == 1
    store = await storage.store()
    await delete_results(store, job.record)
    assert [info async for info in store.list_objects("batches/")] == []


async def test_a_result_that_comes_after_its_line_was_skipped_is_ignored(storage: Storage) -> None:
    job = Job(storage)
    await job.upload()
    await job.answer(0)
    assert await job.skip_others() == 3
    assert await job.answer(1), "of a former owner that has not noticed"
    assert await job.skip_others() == 0, "it stays decided"
    outputs, errors = await job.end()
    assert [each["custom_id"] for each in outputs] == ["line 0"]
    assert [each["custom_id"] for each in errors] == [None, "c", None]
    assert job.record.counts.completed == 1


async def test_without_its_input_a_job_ends_without_names(storage: Storage) -> None:
    job = Job(storage)
    await job.skip_others()
    assert await job.end() == ([], [])
    assert job.record.error_file_id == ""
