"""Puts the results of a batch job together and ends it.

The files' ids are stored first, and results do not change. Whoever repeats the work after a crash
therefore writes the same bytes to the same offsets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from loraplex_services.common.objects import ObjectInfo, ObjectStore
from loraplex_services.gateway.batches import results
from loraplex_services.gateway.batches.book import Step
from loraplex_services.gateway.batches.files import FileRecord, Files, new_file_id
from loraplex_services.gateway.batches.records import (
    COMPLETED,
    FINALIZING,
    BatchRecord,
    Counts,
    now_s,
)
from loraplex_services.gateway.metrics import BATCHES

_DELETES_AT_ONCE = 16


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
    infos = await results.stored_results(store, record)
    counts, failed = await _write_output(files, store, record, infos)
    has_output = len(failed) < len(infos)
    if failed:
        await _write_errors(files, store, record, failed)

    def finish(current: BatchRecord) -> BatchRecord:
        assert current.ending, "`begin` has decided it"
        return replace(
            current,
            status=current.ending,
            counts=counts,
            output_file_id=current.output_file_id if has_output else "",
            error_file_id=current.error_file_id if failed else "",
            ended_s=now_s(),
        )

    await save(finish)
    BATCHES.labels(record.ending).inc()


async def delete_results(store: ObjectStore, record: BatchRecord) -> None:
    """Delete the results of a batch job that has ended."""
    infos = await results.stored_results(store, record)
    for start in range(0, len(infos), _DELETES_AT_ONCE):
        part = infos[start : start + _DELETES_AT_ONCE]
        await asyncio.gather(*(store.delete(info.key) for info in part))


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
    files: Files, store: ObjectStore, record: BatchRecord, infos: Sequence[ObjectInfo]
) -> None:
    async def errors() -> AsyncGenerator[bytes]:
        async with aclosing(results.read_results(store, infos)) as read:
            async for result in read:
                yield result.text

    num_bytes = await files.write(record.tenant, record.error_file_id, errors())
    await files.add(_file(record, record.error_file_id, "error", num_bytes))


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
