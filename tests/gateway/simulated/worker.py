"""A worker in virtual time: fair batches, loads, and tokens that tell who made which request.

Token p is a hash of the prompt, the adapters, seed, sample index and all tokens before it, so that
a request continued with anything but its very own output comes out otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from loraplex.api.error_wire import to_detail
from loraplex.errors import LoraplexError, Unavailable
from loraplex.v1 import common_pb2, worker_pb2
from loraplex_services.common.virtual_counters import (
    INPUT_TOKEN_COST,
    OUTPUT_TOKEN_COST,
    Account,
    VirtualCounters,
)
from loraplex_services.worker.scheduling.admission import reserved_slots
from tests.gateway.simulated.network import Send, Way
from tests.gateway.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, tokenizer_files

BASE_ID = "base"
FILES = tokenizer_files()
_DIGEST = hashlib.sha256(b"".join(FILES.values())).hexdigest()
REPORT_S = 0.1
LATE_S = 0.1
"""A cancel is on its way for a few milliseconds, and a step may have begun."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a worker can do."""

    step_s: float = 0.02
    row_s: float = 0.0
    """Added to a step for each row."""
    prefill_tokens_per_s: float = 8000.0
    load_s: float = 0.1
    batch: int = 8
    slots: int = 8
    """Adapters on the device."""


class Answer:
    """The output of a request, one token after the other."""

    def __init__(self, request: worker_pb2.WorkerRequest) -> None:
        who = (
            tuple(request.prompt_ids),
            tuple((a.digest, round(a.weight, 4)) for a in request.adapters),
            request.sampling.seed,
            request.sample_index,
            request.cache_salt,
        )
        self._state = zlib.crc32(repr(who).encode())
        self._end = 1 + self._state % 48
        self._sampling = request.sampling
        self.position = 0
        for token_id in request.output_ids:
            self._take(token_id)

    def next(self) -> tuple[int, bool]:
        """The next token and whether it is EOS."""
        ends = self.position >= self._end and not self._sampling.ignore_eos
        token_id = EOS_ID if ends else self._state % 256
        self._take(token_id)
        return token_id, ends

    def _take(self, token_id: int) -> None:
        self._state = zlib.crc32(token_id.to_bytes(2, "little"), self._state)
        self.position += 1

    @property
    def is_whole(self) -> bool:
        """True when max_tokens are out."""
        return self.position >= self._sampling.max_tokens


def whole_answer(request: worker_pb2.WorkerRequest) -> list[int]:
    """All of an undisturbed output."""
    answer, out = Answer(request), []
    while True:
        token_id, ends = answer.next()
        out.append(token_id)
        if ends or answer.is_whole:
            return out


@dataclass(slots=True, eq=False)
class _Session:
    send: Send
    rows: dict[str, _Row] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Row:
    """One live request."""

    session: _Session
    request: worker_pb2.WorkerRequest
    answer: Answer
    account: Account
    holds: bool = False
    """Its adapters stay on the device: it runs, or is the next that will."""


class SimulatedWorker:
    """Serves sessions; everything that may go wrong is a method."""

    def __init__(self, name: str, way: Way, speed: Speed = Speed()) -> None:
        self.name = name
        self.way = way
        self.speed = speed
        self.is_up = True
        self.slow = 1.0
        """Steps take this multiple of their time."""
        self.max_waiting: int | None = None
        """Beyond it new requests are refused as a full engine does."""
        self.gone: dict[str, float] = {}
        """When the client of a request went away; shared by all workers."""
        self.num_overrun = 0
        """Tokens computed long after their client had gone."""
        self.num_submitted = 0
        self.num_hits = 0
        """Submitted requests that found their adapters on the device or on their way."""
        self._epoch = 1
        self._is_draining = False
        self._sessions: list[_Session] = []
        self._watchers: list[Send] = []
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._served = VirtualCounters()
        self._slots: OrderedDict[str, float] = OrderedDict()
        """Digest -> when it is there, last used last."""
        self._timer: asyncio.TimerHandle | None = None
        self._reporter: asyncio.TimerHandle | None = None
        self._step = 0
        self._step_s = 0.0
        """Moving mean."""

    @property
    def num_live(self) -> int:
        """Requests here, as far as anybody is there to read them."""
        return sum(len(session.rows) for session in self._sessions)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait."""
        return sum(len(row.request.prompt_ids) for row in self._waiting)

    # What goes wrong.

    def kill(self) -> None:
        """kill -9: streams break, whatever was here is gone."""
        self.is_up = False
        self._sessions.clear()
        self._watchers.clear()
        self._waiting.clear()
        self._running.clear()
        self._served = VirtualCounters()
        self._slots.clear()
        for timer in (self._timer, self._reporter):
            if timer is not None:
                timer.cancel()
        self._timer = self._reporter = None
        self.way.break_all()

    def start(self) -> None:
        """Up again, empty."""
        self.is_up, self._is_draining, self.slow = True, False, 1.0
        self._epoch += 1

    def fail_rows(self, error: LoraplexError | None) -> None:
        """Every request fails with the error, or is given up without one: an engine restarts."""
        for row in (*self._running, *self._waiting):
            self._served.leave(row.request.tenant, self._now())
        for session in self._sessions:
            events = worker_pb2.StepEvents(step=self._step)
            for request_id, row in session.rows.items():
                if error is None:
                    events.tokens.add(
                        request_id=request_id,
                        output_position=row.answer.position,
                        finish_reason=common_pb2.FINISH_REASON_CANCELLED,
                    )
                else:
                    events.failures.add(request_id=request_id, error=to_detail(error))
            session.rows.clear()
            session.send(worker_pb2.SessionResponse(events=events))
        self._running.clear()
        self._waiting.clear()

    def drain(self) -> None:
        """Finish what runs, take nothing new."""
        self._is_draining = True
        self._report()

    # The servers.

    def get_model(self) -> worker_pb2.GetModelResponse:
        """With all files every time; the gateway takes them once."""
        return worker_pb2.GetModelResponse(
            base_id=BASE_ID,
            geometry=common_pb2.ModelGeometry(fingerprint="sha256:" + "b" * 64),
            max_model_len=1 << 16,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_ID],
            bos_token_id=BOS_ID,
            numerics_fingerprint="simulated",
            tokenizer_digest=_DIGEST,
            tokenizer_files=[
                worker_pb2.TokenizerFile(name=name, content=content)
                for name, content in FILES.items()
            ],
            worker_id=self.name,
        )

    async def load_adapter(self, digest: str) -> None:
        """Returns when it could be used."""
        await asyncio.sleep(self._loaded_at(digest) - self._now())

    def watch(self, send: Send) -> None:
        """Reports to one gateway."""
        self._watchers.append(send)
        send(self._status())
        if self._reporter is None:
            self._report_again()

    def open_session(self, send: Send) -> Callable[[worker_pb2.SessionRequest], None]:
        """What hears the gateway's messages; None = the stream ended."""
        session = _Session(send)
        self._sessions.append(session)

        def hear(message: worker_pb2.SessionRequest | None) -> None:
            if message is None:
                self._drop(session)
            elif message.WhichOneof("message") == "hello":
                welcome = worker_pb2.SessionWelcome(worker_id=self.name, epoch=self._epoch)
                send(worker_pb2.SessionResponse(welcome=welcome))
            elif message.WhichOneof("message") == "submit":
                self._submit(session, message.submit)
            elif message.WhichOneof("message") == "cancel":
                self._end(session, message.cancel.request_id)

        return hear

    def _drop(self, session: _Session) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
        for request_id in list(session.rows):
            self._end(session, request_id)

    def _submit(self, session: _Session, request: worker_pb2.WorkerRequest) -> None:
        if self._is_draining:
            return self._refuse(session, request, "the worker drains")
        if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
            return self._refuse(session, request, "the worker is full")
        self.num_submitted += 1
        self.num_hits += all(a.digest in self._slots for a in request.adapters)
        row = _Row(session, request, Answer(request), self._served.arrive(request.tenant))
        session.rows[request.request_id] = row
        self._waiting.append(row)
        if self._timer is None:
            self._plan()

    def _refuse(self, session: _Session, request: worker_pb2.WorkerRequest, text: str) -> None:
        events = worker_pb2.StepEvents(step=self._step)
        events.failures.add(request_id=request.request_id, error=to_detail(Unavailable(text)))
        session.send(worker_pb2.SessionResponse(events=events))

    def _end(self, session: _Session, request_id: str) -> None:
        row = session.rows.pop(request_id, None)
        for rows in (self._running, self._waiting):
            if row in rows:
                rows.remove(row)
                self._served.leave(row.request.tenant, self._now())

    # The engine.

    def _plan(self) -> None:
        """Take in who may run, tenants served least before others, and set off the next step."""
        now_s = self._now()
        prefill = 0
        ready = {row: self._adapters_at(row) for row in self._waiting}
        able = [row for row, at_s in ready.items() if at_s <= now_s]
        while able and (num_free := self.speed.batch - len(self._running)) > 0:
            row = min(able, key=lambda row: row.account.served)
            is_least = self._served.is_least_served(row.request.tenant, now_s)
            if num_free <= reserved_slots(self.speed.batch) and not is_least:
                break
            able.remove(row)
            self._waiting.remove(row)
            self._running.append(row)
            num_tokens = len(row.request.prompt_ids) + len(row.request.output_ids)
            self._served.charge(row.account, num_tokens * INPUT_TOKEN_COST)
            prefill += num_tokens
        if not self._running:
            self._timer = None
            if ready:
                at_s = min(ready.values())
                self._timer = asyncio.get_running_loop().call_at(at_s, self._plan)
            return
        step_s = self.speed.step_s + self.speed.row_s * len(self._running)
        step_s = self.slow * (step_s + prefill / self.speed.prefill_tokens_per_s)
        self._step_s += (step_s - self._step_s) * (0.1 if self._step_s else 1.0)
        self._timer = asyncio.get_running_loop().call_later(step_s, self._compute)

    def _compute(self) -> None:
        """One token for every row that runs."""
        self._step += 1
        by_session: dict[_Session, worker_pb2.StepEvents] = {}
        for row in list(self._running):
            events = by_session.get(row.session)
            if events is None:
                events = by_session[row.session] = worker_pb2.StepEvents(step=self._step)
            events.tokens.append(self._token(row))
        for session, events in by_session.items():
            session.send(worker_pb2.SessionResponse(events=events))
        self._plan()

    def _token(self, row: _Row) -> worker_pb2.TokenEvent:
        client = row.request.request_id.partition(".")[0]
        self.num_overrun += self._now() - self.gone.get(client, math.inf) > LATE_S
        token_id, is_eos = row.answer.next()
        self._served.charge(row.account, OUTPUT_TOKEN_COST)
        event = worker_pb2.TokenEvent(
            request_id=row.request.request_id,
            token_ids=[token_id],
            output_position=row.answer.position - 1,
        )
        if is_eos:
            event.finish_reason, event.stop_token_id = common_pb2.FINISH_REASON_STOP, token_id
        elif row.answer.is_whole:
            event.finish_reason = common_pb2.FINISH_REASON_LENGTH
        if event.finish_reason:
            self._end(row.session, row.request.request_id)
        return event

    def _adapters_at(self, row: _Row) -> float:
        """When a waiting row could run; from when they load, its adapters stay."""
        at_s = max((self._loaded_at(a.digest) for a in row.request.adapters), default=0.0)
        row.holds = all(a.digest in self._slots for a in row.request.adapters)
        return at_s

    def _loaded_at(self, digest: str) -> float:
        """Loads one after the other; the adapter used longest ago makes room."""
        if digest not in self._slots:
            rows = (*self._running, *(row for row in self._waiting if row.holds))
            used = {a.digest for row in rows for a in row.request.adapters}
            while len(self._slots) >= self.speed.slots:
                idle = next((d for d in self._slots if d not in used), None)
                if idle is None:
                    return self._now() + self.speed.step_s
                del self._slots[idle]
            before = max(self._slots.values(), default=0.0)
            self._slots[digest] = max(before, self._now()) + self.speed.load_s
        self._slots.move_to_end(digest)
        return self._slots[digest]

    # Reports.

    def _report_again(self) -> None:
        self._report()
        self._reporter = asyncio.get_running_loop().call_later(REPORT_S, self._report_again)

    def _report(self) -> None:
        for send in self._watchers:
            send(self._status())

    def _status(self) -> worker_pb2.WatchStatusResponse:
        status = worker_pb2.WatchStatusResponse(
            worker_id=self.name,
            epoch=self._epoch,
            full=True,
            ready=not self._is_draining,
            draining=self._is_draining,
            base_id=BASE_ID,
        )
        status.load.running_requests = len(self._running)
        status.load.max_running_requests = self.speed.batch
        status.load.waiting_requests = len(self._waiting)
        status.load.queued_tokens = self.queued_tokens
        status.load.step_s = self._step_s
        status.load.prefill_tokens_per_s = self.speed.prefill_tokens_per_s
        for digest, at_s in self._slots.items():
            there = at_s <= self._now()
            tier = worker_pb2.ADAPTER_TIER_DEVICE if there else worker_pb2.ADAPTER_TIER_LOADING
            status.adapters.add(digest=digest, tier=tier)
        return status

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
