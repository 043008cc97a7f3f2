"""Runs one batch job: keeps the ownership, sends the lines, and ends it.

Every step can be repeated. A gateway that takes a batch job over reads the input from the start,
leaves out the lines that have a result, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

from loraplex.errors import LoraplexError, NotFound, ResourceExhausted, Unauthenticated
from loraplex_services.common.limits import MAX_BATCH_LINES
from loraplex_services.common.objects import ObjectStore, ObjectStoreError
from loraplex_services.gateway.batches import results
from loraplex_services.gateway.batches.book import Step
from loraplex_services.gateway.batches.ending import end_batch
from loraplex_services.gateway.batches.lines import input_lines
from loraplex_services.gateway.batches.records import (
    CANCELLING,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchError,
    BatchRecord,
    Ending,
    now_s,
)
from loraplex_services.gateway.batches.sending import LineSender, RunContext
from loraplex_services.gateway.metrics import BATCH_REQUESTS

logger = logging.getLogger(__name__)

RENEW_S = 5.0
_LINES_AT_ONCE = 1000
"""Lines that are counted before the event loop does other work."""


class LostBatch(Exception):
    """Another gateway owns the batch job now."""


class BatchRun:
    """One batch job at its owner."""

    def __init__(self, context: RunContext, record: BatchRecord) -> None:
        """`record` names this gateway as the owner."""
        self._context = context
        self._record = record
        self._sender = LineSender(context, record)
        self._quota_bytes: int | None = None
        """Bytes that its results may have; None = not known yet."""
        self.nudged = asyncio.Event()
        """Set when the batch job was changed and is to be looked at soon."""

    async def run(self) -> None:
        """Run it to its end. Raises: LostBatch, LoraplexError; its owner may run it again."""
        await self._look()
        working = asyncio.ensure_future(self._work())
        keeping = asyncio.ensure_future(self._keep())
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            (working if working.done() else keeping).result()
        finally:
            working.cancel()
            keeping.cancel()
            await asyncio.gather(working, keeping, return_exceptions=True)

    async def _keep(self) -> None:
        """Renew the ownership and look at what changed, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self.nudged.wait()
            self.nudged.clear()
            try:
                await self._look()
            except ObjectStoreError as error:
                # Results that come in the meantime wait to be stored. Perhaps another gateway
                # takes over, which does no harm.
                logger.warning("batch job not renewed", extra={"problem": error.message})

    async def _look(self) -> None:
        """Renew the ownership, and stop sending lines if the batch job is to end."""
        await self._save(self._renewed)
        record = self._record
        if record.status == FINALIZING:
            return
        if record.ending:
            self._sender.stop()
        elif time.time() >= record.expires_s:
            await self._end_as(EXPIRED)
        elif self._quota_bytes is not None and self._sender.num_bytes > self._quota_bytes:
            why = (
                f"the results exceed the {self._quota_bytes} bytes that their tenant could still "
                "store; delete files, then send the rest in another batch job"
            )
            await self._end_as(FAILED, BatchError("file_quota_exceeded", why))
        elif self._context.check_key is not None:
            try:
                await self._context.check_key(record.key_id)
            except Unauthenticated as error:
                await self._end_as(FAILED, BatchError("invalid_api_key", error.message))
            except LoraplexError:
                pass  # the registry is unavailable; a key that was valid stays so for now

    def _renewed(self, record: BatchRecord) -> BatchRecord:
        """The batch job with the newest counts. At the end they are counted again."""
        if record.status not in (IN_PROGRESS, CANCELLING):
            return record
        return replace(record, counts=self._sender.counts)

    async def _save(self, step: Step) -> BatchRecord:
        """Change the stored job and return it. Raises: LostBatch if another gateway owns it."""

        def owned(record: BatchRecord) -> BatchRecord | None:
            if record.owner != self._context.gateway_id or record.has_ended:
                raise LostBatch
            wanted = step(record)
            return wanted and replace(wanted, renewals=record.renewals + 1)

        record = self._record
        saved = await self._context.book.change(record.tenant, record.batch_id, owned)
        if saved is None:
            raise LostBatch
        self._record = saved
        return saved

    async def _end_as(self, ending: Ending, *errors: BatchError) -> None:
        """Decide how the batch job ends, unless that is decided, and send no more lines."""
        await self._save(lambda record: _ending(record, ending, *errors))
        self._sender.stop()

    async def _work(self) -> None:
        store = await self._context.storage.store()
        if not self._record.num_lines and self._record.status in (VALIDATING, CANCELLING):
            await self._validate()
        if self._record.status in (IN_PROGRESS, CANCELLING):
            await self._send_lines(store)
        await end_batch(self._context.files, store, self._record, self._save)

    async def _validate(self) -> None:
        """Count the lines, which says whether the file can be a batch job."""
        num_lines, error = 0, None
        try:
            async with input_lines(self._context.files, self._record) as lines:
                async for _ in lines:
                    num_lines += 1
                    if num_lines % _LINES_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    if num_lines > MAX_BATCH_LINES:
                        why = f"the file has more than {MAX_BATCH_LINES} requests"
                        error = BatchError("too_many_requests", why)
                        break
        except NotFound as missing:
            error = BatchError("file_not_found", missing.message)
        if not num_lines and error is None:
            error = BatchError("empty_file", "the file has no requests")

        def step(record: BatchRecord) -> BatchRecord:
            if error is not None:
                return _ending(replace(record, status=FINALIZING), FAILED, error)
            if record.status == CANCELLING:
                return replace(record, num_lines=num_lines)
            return replace(record, status=IN_PROGRESS, num_lines=num_lines, in_progress_s=now_s())

        await self._save(step)

    async def _send_lines(self, store: ObjectStore) -> None:
        stored = await results.stored_results(store, self._record)
        self._sender.num_bytes = sum(info.size for info in stored)
        files = await self._context.files.stored(self._record.tenant)
        try:
            self._quota_bytes = files.check_quota()
        except ResourceExhausted as error:
            await self._end_as(FAILED, BatchError("file_quota_exceeded", error.message))
        try:
            async with input_lines(self._context.files, self._record) as lines:
                await self._sender.send(lines, set(map(results.index_of, stored)))
        except NotFound as missing:
            await self._end_as(FAILED, BatchError("file_not_found", missing.message))
        if self._record.ending:
            num_skipped = await results.skip_others(store, self._record)
            BATCH_REQUESTS.labels("skipped").inc(num_skipped)


def _ending(record: BatchRecord, ending: Ending, *errors: BatchError) -> BatchRecord:
    """The batch job once it is decided how it ends, unless that was decided before."""
    return record if record.ending else replace(record, ending=ending, errors=errors)
