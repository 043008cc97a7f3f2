"""Gets a result for each line of a batch job: sends the lines, repeats some, and stores the
answers."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from loraplex.errors import InvalidRequest, ResourceExhausted
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import HTTP_BODY, MAX_BATCH_LINES_IN_FLIGHT
from loraplex_services.common.objects import ObjectStoreError
from loraplex_services.gateway.batches import results
from loraplex_services.gateway.batches.book import BatchBook
from loraplex_services.gateway.batches.files import Files
from loraplex_services.gateway.batches.lines import CustomIds, Line, read_line, wrong_line
from loraplex_services.gateway.batches.pace import Pace
from loraplex_services.gateway.batches.records import BatchError, BatchRecord
from loraplex_services.gateway.batches.results import Answer, Result
from loraplex_services.gateway.batches.storage import Storage
from loraplex_services.gateway.metrics import BATCH_REQUESTS

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
"""The most attempts for a line that fails on a server. A line that is refused with a retry hint is
sent again until the job expires."""
_MAX_WAIT_S = 30.0
_STORE_RETRY_S = 1.0


class Endpoints(Protocol):
    """The endpoints of the gateway, called from within."""

    async def parse(self, raw: bytes, caller: Caller) -> dict[str, Any]:
        """The object of a line. Raises: InvalidRequest."""

    async def post(
        self, caller: Caller, path: str, body: dict[str, Any], request_id: str
    ) -> Answer:
        """The answer of an endpoint to a request of the background priority."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """The parts that all runs of one gateway share."""

    gateway_id: str
    storage: Storage
    files: Files
    book: BatchBook
    endpoints: Endpoints
    pace: Pace
    unread: Callable[[Caller, int], AbstractContextManager[None]]
    """Counts an answer of some bytes until it is stored; raises InvalidRequest if it has too many,
    and ResourceExhausted if its tenant has."""
    check_key: Callable[[str], Awaitable[Caller]] | None
    """The holder of the key with an id; raises Unauthenticated. None without keys."""


class LineSender:
    """The lines of one batch job at its owner."""

    def __init__(self, context: RunContext, record: BatchRecord) -> None:
        self._context = context
        self._record = record
        self._caller = Caller(record.tenant, record.key_id, frozenset(record.scopes))
        self.counts = record.counts
        """Counts of the lines with a result."""
        self.num_bytes = 0
        """Bytes of the results that are stored."""
        self._custom_ids = CustomIds()
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        """The tasks that wait for an answer."""
        self._failure: BaseException | None = None
        """The first error of a task: a line without a result must not go unnoticed."""
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Send no more lines, and give up those without an answer."""
        if not self._stopping.is_set():
            self._stopping.set()
            for task in self._answering:
                task.cancel()

    async def send(self, lines: AsyncIterator[bytes | None], done: Collection[int]) -> None:
        """Get a result for each line, except for the indices `done`, which have one, and for lines
        that `stop` gives up.

        Cancelling it cancels the requests in flight.
        """
        index = 0
        try:
            async for raw in lines:
                if self._stopping.is_set():
                    break
                if index in done:
                    await self._read(index, raw)
                    await asyncio.sleep(0)
                else:
                    await self._begin(index, raw)
                index += 1
            while self._tasks:
                await asyncio.wait(self._tasks)
            self._raise_failure()
        finally:
            tasks = set(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, index: int, raw: bytes | None) -> None:
        """Begin with a line as soon as the limit of lines in flight allows it."""
        while len(self._tasks) >= MAX_BATCH_LINES_IN_FLIGHT:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._raise_failure()
        num_bytes = len(raw or b"")
        if not await self._acquired(num_bytes):
            return
        try:
            line = await self._read(index, raw)
        except BaseException:
            self._context.pace.release(num_bytes)
            raise
        task = asyncio.create_task(self._finish(line, num_bytes))
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        await asyncio.sleep(0)  # a task that is cancelled before it begins would release nothing

    async def _acquired(self, num_bytes: int) -> bool:
        """Wait until a line may be sent; False once lines are no longer sent."""
        pace = self._context.pace
        waiting = asyncio.ensure_future(pace.acquire(self._record.tenant, num_bytes))
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({waiting, stop}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not await _is_withdrawn(waiting):
                pace.release(num_bytes)
            raise
        finally:
            stop.cancel()
        return waiting.done() or not await _is_withdrawn(waiting)

    async def _read(self, index: int, raw: bytes | None) -> Line:
        """The line. Mutates: the custom_ids that were seen."""
        if raw is None:
            why = f"has more than {HTTP_BODY.max_message_bytes} bytes"
            return wrong_line(index, "line_too_long", why, None)
        try:
            fields = await self._context.endpoints.parse(raw, self._caller)
        except InvalidRequest as error:
            return wrong_line(index, "invalid_json_line", error.message, None)
        line = read_line(index, fields, self._record.endpoint)
        if line.custom_id is not None and not self._custom_ids.add(line.custom_id):
            why = "an earlier request has the same custom_id"
            return wrong_line(index, "duplicate_custom_id", why, line.custom_id)
        return line

    async def _finish(self, line: Line, held_bytes: int) -> None:
        """Get a result for one line. `held_bytes`: what the line holds of the pace."""
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            if self._stopping.is_set():
                return
            with ExitStack() as unread:
                result = await self._result(line, unread)
                self._answering.discard(task)
                await self._store(line, result)
        finally:
            self._answering.discard(task)
            self._context.pace.release(held_bytes)

    async def _result(self, line: Line, unread: ExitStack) -> Result:
        """The result of a line, which counts as an unread answer until `unread` is closed."""
        if line.error is not None:
            return results.refused(self._record, line, line.error)
        assert line.body is not None
        attempt = 0
        while True:
            attempt += 1
            request_id = f"{results.line_id(self._record, line)}-{secrets.token_hex(4)}"
            answer = await self._context.endpoints.post(
                self._caller, self._record.endpoint, line.body, request_id
            )
            wait_s = retry_wait_s(answer, attempt)
            if wait_s is None:
                try:
                    unread.enter_context(self._context.unread(self._caller, len(answer.body)))
                    return results.answered(self._record, line, answer)
                except InvalidRequest as error:
                    too_large = BatchError("answer_too_large", error.message)
                    return results.refused(self._record, line, too_large)
                except ResourceExhausted:  # the store is slower than the answers
                    del answer
                    wait_s = _MAX_WAIT_S
            async with self._context.pace.paused(self._record.tenant):
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))

    async def _store(self, line: Line, result: Result) -> None:
        """Store a result, however long the object store is unavailable."""
        while True:
            try:
                store = await self._context.storage.store()
                is_first = await results.store_result(store, self._record, line, result)
                break
            except ObjectStoreError as error:
                logger.warning("result not stored yet", extra={"problem": error.message})
                await asyncio.sleep(_STORE_RETRY_S)
        if is_first:
            self.num_bytes += len(result.text)
            self.counts += result.counts
            BATCH_REQUESTS.labels("ok" if result.is_output else "failed").inc()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


async def _is_withdrawn(task: asyncio.Future[None]) -> bool:
    """Whether a task could be cancelled before it was done."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return task.cancelled()


def retry_wait_s(answer: Answer, attempt: int) -> float | None:
    """Seconds after which a request is sent again; None = its answer stands.

    A refusal with a retry hint is only a matter of time. Other errors of a server may be due to the
    request itself.
    """
    backoff_s = min(0.5 * 2.0 ** min(attempt, 10), _MAX_WAIT_S)
    if answer.retry_after_s is not None and answer.status in (429, 503, 504):
        return min(max(answer.retry_after_s, backoff_s), _MAX_WAIT_S)
    return backoff_s if answer.status >= 500 and attempt < _MAX_ATTEMPTS else None
