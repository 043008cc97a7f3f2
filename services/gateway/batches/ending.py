"""Puts the results of a batch job together and ends it.

The files' ids are stored first, and results do not change. Whoever repeats the work after a crash
therefore writes the same bytes to the same offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from loraplex.errors import NotFound
from loraplex_services.common.objects import ObjectInfo, ObjectStore
from loraplex_services.gateway.batches import layout, results
from loraplex_services.gateway.batches.book import Step
from loraplex_services.gateway.batches.files import FileRecord, Files, new_file_id
from loraplex_services.gateway.batches.lines import Line, custom_id_of, input_lines
from loraplex_services.gateway.batches.records import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    BatchError,
    BatchRecord,
    Counts,
    now_s,
)
from loraplex_services.gateway.metrics import BATCHES

_DELETES_AT_ONCE = 16
_LINES_AT_ONCE = 100
"""Skipped lines that are named before the event loop does other work."""
_SKIPPED: Mapping[str, BatchError] = {
    CANCELLED: BatchError("batch_cancelled", "its batch job was cancelled before it ended"),
    EXPIRED: BatchError("batch_expired", "its batch job expired before it ended"),
    FAILED: BatchError("batch_failed", "its batch job failed before it ended"),
}


async def end_batch(
    files: Files,
    store: ObjectStore,
    record: BatchRecord,
    save: Callable[[Step], Awaitable[BatchRecord]],
) -> None:
    """Write the output and the error file, and give the batch job its last status.

    Raises: what `save` raises, ObjectStoreError.
    """
    if not record.finalizing_s:
        output_id, error_id = new_file_id(), new_file_id()

        def begin(current: BatchRecord) -> BatchRecord:
            return replace(
                current,
                status=FINALIZING,
                ending=current.ending or COMPLETED,
                finalizing_s=now_s(),
                output_file_id=output_id,
                error_file_id=error_id,
            )

        record = await save(begin)
    skipped = await results.skipped_lines(store, record)
    infos = await _results_but(skipped, store, record)
    counts, failed = await _write_output(files, store, record, infos)
    has_output = len(failed) < len(infos)
    has_errors = await _write_errors(files, store, record, failed, skipped)

    def finish(current: BatchRecord) -> BatchRecord:
        assert current.ending, "`begin` has decided it"
        return replace(
            current,
            status=current.ending,
            counts=counts,
            output_file_id=current.output_file_id if has_output else "",
            error_file_id=current.error_file_id if has_errors else "",
            ended_s=now_s(),
        )

    await save(finish)
    BATCHES.labels(record.ending).inc()


async def delete_results(store: ObjectStore, record: BatchRecord) -> None:
    """Delete the results of a batch job that has ended."""
    prefix = layout.results(record.tenant, record.batch_id)
    infos = [info async for info in store.list_objects(prefix)]
    for start in range(0, len(infos), _DELETES_AT_ONCE):
        part = infos[start : start + _DELETES_AT_ONCE]
        await asyncio.gather(*(store.delete(info.key) for info in part))


async def _results_but(
    skipped: Collection[int], store: ObjectStore, record: BatchRecord
) -> list[ObjectInfo]:
    """The results, but those that a former owner stored after their lines were skipped."""
    infos = await results.stored_results(store, record)
    left_out = set(skipped)
    return [info for info in infos if results.index_of(info) not in left_out]


async def _write_output(
    files: Files, store: ObjectStore, record: BatchRecord, infos: Sequence[ObjectInfo]
) -> tuple[Counts, list[ObjectInfo]]:
    """Write the output file, if there are outputs. Returns what all results count as, and those
    that are errors."""
    counts, failed = Counts(), list[ObjectInfo]()

    async def outputs() -> AsyncGenerator[bytes]:
        nonlocal counts
        at = 0
        async with aclosing(results.read_results(store, infos)) as read:
            async for result in read:
                counts += result.counts
                if result.is_output:
                    yield result.text
                else:
                    failed.append(infos[at])
                at += 1

    num_bytes = await files.write(record.tenant, record.output_file_id, outputs())
    if num_bytes:
        await files.add(_file(record, record.output_file_id, "output", num_bytes))
    return counts, failed


async def _write_errors(
    files: Files,
    store: ObjectStore,
    record: BatchRecord,
    infos: Sequence[ObjectInfo],
    skipped: Sequence[int],
) -> bool:
    """Write the error file, if there are errors: the results `infos` and the lines `skipped`, which
    are both in order. Returns whether there are any."""

    async def errors() -> AsyncGenerator[bytes]:
        async with (
            aclosing(results.read_results(store, infos)) as read,
            aclosing(_skipped_texts(files, record, skipped)) as texts,
        ):
            left_out = await anext(texts, None)
            for info in infos:
                while left_out is not None and left_out[0] < results.index_of(info):
                    yield left_out[1]
                    left_out = await anext(texts, None)
                yield (await anext(read)).text
            while left_out is not None:
                yield left_out[1]
                left_out = await anext(texts, None)

    num_bytes = await files.write(record.tenant, record.error_file_id, errors())
    if num_bytes:
        await files.add(_file(record, record.error_file_id, "error", num_bytes))
    return num_bytes > 0


async def _skipped_texts(
    files: Files, record: BatchRecord, skipped: Sequence[int]
) -> AsyncGenerator[tuple[int, bytes]]:
    """Indices of skipped lines, and what the error file says of them. The input has their names;
    without it, as of a job that failed because it was deleted, there are none."""
    if not skipped:
        return  # most inputs need not be read again
    error, left_out = _SKIPPED[record.ending], set(skipped)
    with contextlib.suppress(NotFound):
        async with input_lines(files, record) as lines:
            index = 0
            async for raw in lines:
                if index in left_out:
                    line = Line(index, custom_id_of(raw))
                    yield index, results.error_text(record, line, error)
                index += 1
                if index % _LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)


def _file(record: BatchRecord, file_id: str, kind: str, num_bytes: int) -> FileRecord:
    return FileRecord(
        file_id=file_id,
        tenant=record.tenant,
        filename=f"{record.batch_id}_{kind}.jsonl",
        purpose="batch_output",
        num_bytes=num_bytes,
        created_s=record.finalizing_s,
        expires_s=record.finalizing_s + record.output_lifetime_s,
    )
