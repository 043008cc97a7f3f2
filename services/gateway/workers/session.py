"""The session with one worker: sends all requests of this gateway, gets one message per step."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from loraplex.api.error_wire import from_detail, from_rpc_error
from loraplex.errors import InvalidRequest, LoraplexError, Unavailable
from loraplex.v1 import worker_pb2, worker_pb2_grpc
from loraplex_services.common.limits import limits_of
from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.request import WorkerJob, with_names
from loraplex_services.gateway.workers.convert import job_to_wire, tokens_from_wire
from loraplex_services.gateway.workers.outbox import Outbox, QueuedJob
from loraplex_services.gateway.workers.token_stream import TokenStream, WakeupPacer

logger = logging.getLogger(__name__)

_END: Any = grpc.aio.EOF
OPEN_TIMEOUT_S = 10.0
ACK_S = 0.1
_INDEX = re.compile(r"\[\d+\]$")


MAX_JOB_BYTES = limits_of("/loraplex.v1.WorkerService/Session").max_message_bytes


class WorkerLost(Unavailable):
    """The session broke. What was running there must continue elsewhere."""

    reason = "WORKER_LOST"


@dataclass(slots=True)
class _Running:
    """A job that has not ended."""

    stream: TokenStream
    digests: tuple[str, ...]
    num_waiting: int
    """Tokens that the worker has to compute before the first new one; then 0."""


class WorkerSession:
    """Multiplexes jobs over one stream. Lives on the event loop."""

    def __init__(
        self,
        stub: worker_pb2_grpc.WorkerServiceStub,
        metadata: tuple[tuple[str, str], ...],
        pacer: WakeupPacer,
    ) -> None:
        self._call: Any = stub.Session(metadata=metadata)
        self._outbox = Outbox()
        self._jobs: dict[str, _Running] = {}
        """Jobs by the id of their requests on the wire."""
        self.in_flight_tokens = 0
        """Sum of their `num_waiting`."""
        self._uses: NonzeroCounter[str] = NonzeroCounter()
        self.adapters: frozenset[str] = frozenset()
        """Adapters of the requests that have not ended."""
        self._numbers = itertools.count(1)
        self._pacer = pacer
        self._last_step = 0
        self._ack_timer: asyncio.TimerHandle | None = None
        self.worker_id = ""
        self.epoch = 0
        self.is_open = False

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._jobs)

    async def open(self, gateway_id: str) -> None:
        """Open the session with a handshake. Raises: LoraplexError."""
        hello = worker_pb2.SessionHello(gateway_id=gateway_id)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._call.write(worker_pb2.SessionRequest(hello=hello))
                message = await self._call.read()
        except TimeoutError:
            raise WorkerLost("the handshake with the worker timed out") from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if message is _END or message.WhichOneof("message") != "welcome":
            raise WorkerLost("the worker ended the session during the handshake")
        self.worker_id, self.epoch = message.welcome.worker_id, message.welcome.epoch
        self.is_open = True

    def submit(self, job: WorkerJob) -> TokenStream:
        """Submit a job. Raises: WorkerLost if the session is closed."""
        if not self.is_open:
            raise WorkerLost(f"worker {self.worker_id} is not connected")
        request = job.request
        wire_id = f"{request.request_id}.{request.sample_index}.{next(self._numbers)}"
        stream = TokenStream(lambda: self._cancel(wire_id), self._pacer, request.tenant)
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        self._jobs[wire_id] = _Running(stream, request.adapters.digests, num_tokens)
        self._pacer.opened(request.tenant)
        self.in_flight_tokens += num_tokens
        self._note_adapters(request.adapters.digests)
        self._outbox.put_job(wire_id, job)
        return stream

    async def run(self, heard: Callable[[], None]) -> None:
        """Exchange messages until the stream ends, then fail the rest. Calls `heard` per message.

        Raises: WorkerLost always, or the error that ended the stream; CancelledError where nothing
        could be written any more.
        """
        writer = asyncio.create_task(self._write())
        try:
            while (message := await self._call.read()) is not _END:
                heard()
                self._handle(message.events)
            raise WorkerLost(f"worker {self.worker_id} ended the session")
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self.is_open = False
            writer.cancel()
            self._call.cancel()
            self._fail_all()

    async def _write(self) -> None:
        try:
            while True:
                taken = await self._outbox.next()
                message = self._message(taken) if isinstance(taken, QueuedJob) else taken
                if message is not None:
                    await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            logger.debug("session ended; the reader logs the reason")
        finally:
            # A session that can no longer send must not look open.
            self._call.cancel()

    def _message(self, queued: QueuedJob) -> worker_pb2.SessionRequest | None:
        """The message of a job; None if it has ended, or fails because it is too large.

        A worker that refuses a message ends the session, and with it the streams of all tenants.
        """
        running = self._jobs.get(queued.wire_id)
        if running is None:
            return None
        submit = job_to_wire(queued.job, queued.wire_id, now_s())
        message = worker_pb2.SessionRequest(submit=submit)
        num_bytes = message.ByteSize()
        if num_bytes <= MAX_JOB_BYTES:
            return message
        self._forget(queued.wire_id)
        running.stream.fail(
            InvalidRequest(
                f"the request takes {num_bytes} bytes; workers accept at most {MAX_JOB_BYTES}",
                reason="MESSAGE_TOO_LARGE",
            )
        )
        return None

    def _handle(self, events: worker_pb2.StepEvents) -> None:
        for event in events.tokens:
            running = self._jobs.get(event.request_id)
            if running is None:
                continue
            if event.token_ids:
                self._note_first_token(running)
            tokens = tokens_from_wire(event, self.worker_id, running.digests)
            if event.finish_reason:
                self._forget(event.request_id)
            running.stream.put(tokens)
        for failure in events.failures:
            running = self._jobs.get(failure.request_id)
            if running is not None:
                self._forget(failure.request_id)
                running.stream.fail(with_client_fields(from_detail(failure.error)))
        self._ack_soon(events.step)

    def _ack_soon(self, step: int) -> None:
        """Acknowledge after a while: one ack covers all steps before it, and each costs a
        message."""
        self._last_step = step
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_S, self._ack)

    def _ack(self) -> None:
        self._ack_timer = None
        if self.is_open:
            ack = worker_pb2.SessionAck(step=self._last_step)
            self._outbox.put_notice(worker_pb2.SessionRequest(ack=ack))

    def _cancel(self, wire_id: str) -> None:
        if self._forget(wire_id) and self.is_open:
            cancel = worker_pb2.SessionCancel(request_id=wire_id)
            self._outbox.put_notice(worker_pb2.SessionRequest(cancel=cancel))

    def _note_first_token(self, running: _Running) -> None:
        self.in_flight_tokens -= running.num_waiting
        running.num_waiting = 0

    def _forget(self, wire_id: str) -> bool:
        if (running := self._jobs.pop(wire_id, None)) is None:
            return False
        self._note_first_token(running)
        self._pacer.closed(running.stream.tenant)
        self._drop_adapters(running.digests)
        return True

    def _note_adapters(self, digests: tuple[str, ...]) -> None:
        self._uses.update(digests)
        if not self.adapters.issuperset(digests):
            self.adapters = frozenset(self._uses)

    def _drop_adapters(self, digests: tuple[str, ...]) -> None:
        for digest in digests:
            self._uses.remove(digest)
        if len(self._uses) < len(self.adapters):
            self.adapters = frozenset(self._uses)

    def _fail_all(self) -> None:
        for running in self._jobs.values():
            running.stream.fail(WorkerLost(f"the connection to worker {self.worker_id} was lost"))
            self._pacer.closed(running.stream.tenant)
        self._jobs.clear()
        self.in_flight_tokens = 0
        self._uses.clear()
        self.adapters = frozenset()


def with_client_fields(error: LoraplexError) -> LoraplexError:
    """A worker's refusal with the field names that the client sent. Mutates: error.

    A worker names fields of the WorkerRequest that the gateway built, such as `prompt_ids[3]`.
    Which ids and lengths an adapter allows is known only there, so its refusals reach clients,
    which sent a prompt and flat options.
    """
    if not isinstance(error, InvalidRequest):
        return error
    return with_names(error, {v.field: _client_field(v.field) for v in error.violations})


def _client_field(field: str) -> str:
    name = _INDEX.sub("", field.removeprefix("sampling."))
    return "prompt" if name == "prompt_ids" else name
