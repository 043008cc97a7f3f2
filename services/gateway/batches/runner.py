"""Finds batch jobs that nobody runs, and runs them.

Every gateway looks at all unfinished batch jobs. One without an owner is claimed at once. One whose
document has not changed for a lease, by this gateway's own clock, has lost its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from dataclasses import replace

from loraplex.errors import DataLoss, LoraplexError
from loraplex_services.common.limits import (
    MAX_RUNNING_BATCHES,
    MAX_RUNNING_BATCHES_PER_TENANT,
)
from loraplex_services.gateway.batches.ending import delete_results
from loraplex_services.gateway.batches.records import BatchRecord
from loraplex_services.gateway.batches.run import BatchRun, LostBatch
from loraplex_services.gateway.batches.sending import RunContext
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.metrics import RUNNING_BATCHES

logger = logging.getLogger(__name__)

LEASE_S = 20.0
POLL_S = 5.0
_EMPTY_S = 600.0
"""A batch job that has no document for this long never gets one: its gateway died."""
_CLOSE_S = 5.0
_RETRY_S = 30.0
_DAMAGED = "damaged"
"""Stands for the etag of a document that cannot be read."""

Name = tuple[str, str]
"""Tenant and id of a batch job."""


class BatchRunner:
    """Runs batch jobs at one gateway."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._runs: dict[Name, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._seen: dict[Name, tuple[str, float]] = {}
        """The etag of a batch job that another gateway runs, and since when it has it; "" for a job
        without a document, and `_DAMAGED`."""
        self._woken = asyncio.Event()
        self._is_closing = False

    async def run(self) -> None:
        """Look for batch jobs until `close`, or until cancelled."""
        while not self._is_closing:
            wait_s = POLL_S
            try:
                await self._look()
            except LoraplexError as error:
                logger.warning("looking for batch jobs failed", extra={"problem": error.message})
                wait_s = _RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            self._woken.clear()

    def wake(self, tenant: str, batch_id: str) -> None:
        """A batch job was created or cancelled here: look at it soon."""
        if (tenant, batch_id) in self._runs:
            self._runs[tenant, batch_id][0].nudged.set()
        else:
            self._woken.set()

    async def close(self) -> None:
        """End all runs and leave their batch jobs to other gateways."""
        self._is_closing = True
        runs = dict(self._runs)
        for _, task in runs.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in runs.values()), return_exceptions=True)
        with contextlib.suppress(TimeoutError, LoraplexError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*map(self._release, runs))

    async def _look(self) -> None:
        names = dict.fromkeys(await self._context.book.unfinished())
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        running = Counter(tenant for tenant, _ in self._runs)
        for name in names:
            if self._is_closing:
                return
            if name in self._runs or len(self._runs) >= MAX_RUNNING_BATCHES:
                continue
            if running[name[0]] >= MAX_RUNNING_BATCHES_PER_TENANT:
                continue
            try:
                record = await self._claimed(name)
            except DataLoss as error:  # It must not keep others from being run.
                if self._is_new(name, _DAMAGED):
                    facts = {"problem": error.message}
                    logger.error("a damaged batch job was skipped", extra=facts)
                continue
            if record is not None and self._is_closing:
                await self._release(name)
            elif record is not None:
                running[record.tenant] += 1
                self._start(record)

    async def _claimed(self, name: Name) -> BatchRecord | None:
        """The batch job, if this gateway owns it from now on."""
        found = await self._context.book.find(*name)
        if found is None:
            if self._is_stale(name, "", _EMPTY_S):
                await self._context.book.forget(*name)
            return None
        record = found.record
        if record.has_ended:
            await self._forget(record)
            return None
        if record.owner and not self._is_stale(name, found.etag, LEASE_S):
            return None

        def claim(current: BatchRecord) -> BatchRecord | None:
            if (current.owner, current.renewals) != (record.owner, record.renewals):
                return None  # another gateway was faster, or its owner is back
            return replace(current, owner=self._context.gateway_id, renewals=current.renewals + 1)

        claimed = await self._context.book.change(*name, claim)
        if claimed is None or claimed.owner != self._context.gateway_id:
            return None
        if record.owner:
            facts = {"batch_id": record.batch_id, "from": record.owner}
            logger.warning("batch job taken over", extra=facts)
        return claimed

    def _is_stale(self, name: Name, etag: str, lease_s: float) -> bool:
        """Whether a batch job has had this etag for longer than a lease."""
        return not self._is_new(name, etag) and now_s() - self._seen[name][1] > lease_s

    def _is_new(self, name: Name, etag: str) -> bool:
        """Whether a batch job had another etag when it was last looked at. Notes this one."""
        if name in self._seen and self._seen[name][0] == etag:
            return False
        self._seen[name] = etag, now_s()
        return True

    def _start(self, record: BatchRecord) -> None:
        name = (record.tenant, record.batch_id)
        run = BatchRun(self._context, record)
        task = asyncio.create_task(self._run(run, record))
        self._runs[name] = (run, task)
        RUNNING_BATCHES.set(len(self._runs))
        task.add_done_callback(lambda _: self._ended(name))

    def _ended(self, name: Name) -> None:
        del self._runs[name]
        RUNNING_BATCHES.set(len(self._runs))
        self._woken.set()

    async def _run(self, run: BatchRun, record: BatchRecord) -> None:
        """Run a batch job to its end. After a failure its lease runs out, and it is run again."""
        facts = {"batch_id": record.batch_id, "tenant": record.tenant}
        try:
            await run.run()
            await self._forget(record)
            logger.info("batch job ended", extra=facts)
        except LostBatch:
            logger.warning("batch job lost to another gateway", extra=facts)
        except LoraplexError as error:
            logger.warning("batch job interrupted", extra={**facts, "problem": error.message})
        except Exception:
            logger.exception("batch job interrupted", extra=facts)

    async def _forget(self, record: BatchRecord) -> None:
        """Clean up after a batch job that has ended."""
        await delete_results(await self._context.storage.store(), record)
        await self._context.book.forget(record.tenant, record.batch_id)

    async def _release(self, name: Name) -> None:
        def step(current: BatchRecord) -> BatchRecord | None:
            if current.owner != self._context.gateway_id or current.has_ended:
                return None
            return replace(current, owner="", renewals=current.renewals + 1)

        await self._context.book.change(*name, step)
