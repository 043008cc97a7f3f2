"""The result of one line: an object in the store, and then a line of the output or error file.

An object begins with a line of what it counts as. The first result of a line stays. Where a batch
job ends early, one object names the lines that were skipped; results that come later are ignored.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loraplex.errors import DataLoss
from loraplex_services.common.objects import (
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    PreconditionFailed,
    WriteUncertain,
)
from loraplex_services.gateway.batches import layout
from loraplex_services.gateway.batches.lines import Line
from loraplex_services.gateway.batches.records import BatchError, BatchRecord, Counts

_READ_BYTES = 16 << 20
_READ_OBJECTS = 64
"""Results that are read at a time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an endpoint to a line."""

    status: int
    body: bytes
    """JSON on one line."""
    request_id: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A line of the output or error file."""

    is_output: bool
    counts: Counts
    text: bytes
    """The line with its newline."""

    def encoded(self) -> bytes:
        """As it is stored."""
        head = msgspec.json.encode({"is_output": self.is_output, "counts": self.counts})
        return head + b"\n" + self.text


class _Head(msgspec.Struct):
    is_output: bool
    counts: Counts


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answered(msgspec.Struct):
    usage: _Usage | None = None


def answered(record: BatchRecord, line: Line, answer: Answer) -> Result:
    """The result of a line that an endpoint answered."""
    is_output = answer.status == 200
    head = _head(record, line)
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (
        answer.status,
        msgspec.json.encode(answer.request_id),
        answer.body,
    )
    text = head + b',"response":' + response + b',"error":null}\n'
    counts = _counts_of(answer.body) if is_output else Counts(failed=1)
    return Result(is_output, counts, text)


def refused(record: BatchRecord, line: Line, error: BatchError) -> Result:
    """The result of a line that is no request."""
    return Result(False, Counts(failed=1), error_text(record, line, error))


def error_text(record: BatchRecord, line: Line, error: BatchError) -> bytes:
    """A line of the error file for a line that was not sent."""
    fields = msgspec.json.encode({"code": error.code, "message": error.message})
    return _head(record, line) + b',"response":null,"error":' + fields + b"}\n"


def line_id(record: BatchRecord, line: Line) -> str:
    """The id of a line's request, the same whenever it is sent."""
    return f"batch_req_{record.batch_id.removeprefix('batch_')}_{line.index}"


def _head(record: BatchRecord, line: Line) -> bytes:
    named: dict[str, Any] = {"id": line_id(record, line), "custom_id": line.custom_id}
    return msgspec.json.encode(named)[:-1]


def _counts_of(body: bytes) -> Counts:
    usage = msgspec.json.decode(body, type=_Answered).usage or _Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    output_details = usage.output_tokens_details or _Details()
    return Counts(
        completed=1,
        input_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=details.cached_tokens,
        output_tokens=usage.completion_tokens or usage.output_tokens,
        reasoning_tokens=output_details.reasoning_tokens,
    )


async def store_result(store: ObjectStore, record: BatchRecord, line: Line, result: Result) -> bool:
    """Store a result; False if the line has one already. Raises: ObjectStoreError."""
    key = layout.result(record.tenant, record.batch_id, line.index)
    try:
        await store.put_if_absent(key, result.encoded())
    except PreconditionFailed:
        return False
    except WriteUncertain:
        if await store.head(key) is None:
            raise
        return False
    return True


async def stored_results(store: ObjectStore, record: BatchRecord) -> list[ObjectInfo]:
    """The objects of a batch job's results, in the order of its lines."""
    prefix = layout.results(record.tenant, record.batch_id)
    skipped = layout.skipped(record.tenant, record.batch_id)
    return [info async for info in store.list_objects(prefix) if info.key != skipped]


async def skip_others(store: ObjectStore, record: BatchRecord) -> int:
    """Decide that the lines without a result get none, unless that is decided. Returns how many
    were skipped by this call. Raises: ObjectStoreError."""
    stored = set(map(index_of, await stored_results(store, record)))
    others = [index for index in range(record.num_lines) if index not in stored]
    key = layout.skipped(record.tenant, record.batch_id)
    try:
        await store.put_if_absent(key, msgspec.json.encode(others))
    except PreconditionFailed:
        return 0
    except WriteUncertain:
        if await store.head(key) is None:
            raise
        return 0
    return len(others)


async def skipped_lines(store: ObjectStore, record: BatchRecord) -> list[int]:
    """The indices of the lines that get no result. Raises: ObjectStoreError, DataLoss."""
    key = layout.skipped(record.tenant, record.batch_id)
    try:
        stored = await store.get(key)
        return msgspec.json.decode(stored.data, type=list[int])
    except ObjectMissing:
        return []
    except msgspec.MsgspecError as error:
        raise DataLoss(f"{key} is damaged: {error}") from None


def index_of(info: ObjectInfo) -> int:
    """The line that a result belongs to."""
    return int(info.key.rpartition("/")[2])


async def read_results(store: ObjectStore, infos: Sequence[ObjectInfo]) -> AsyncGenerator[Result]:
    """The results of these objects, of which few are in memory at a time."""
    start = 0
    while start < len(infos):
        end, num_bytes = start + 1, infos[start].size
        while end < len(infos) and end - start < _READ_OBJECTS:
            num_bytes += infos[end].size
            if num_bytes > _READ_BYTES:
                break
            end += 1
        keys = [info.key for info in infos[start:end]]
        for key, data in zip(keys, await store.get_many(keys), strict=True):
            if data is None:
                raise ObjectMissing(key)
            yield _decoded(key, data)
        start = end


def _decoded(key: str, data: bytes) -> Result:
    head, _, text = data.partition(b"\n")
    try:
        facts = msgspec.json.decode(head, type=_Head)
    except msgspec.MsgspecError as error:
        raise DataLoss(f"the result {key} is damaged: {error}") from None
    return Result(facts.is_output, facts.counts, text)
