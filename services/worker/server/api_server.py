"""The API server: connects sessions with gateways to the engine and the adapters.

It uses neither gRPC nor torch. It runs on the event loop, so nothing here blocks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from loraplex.api.request import WorkerRequest
from loraplex.api.residency import AdapterResidency
from loraplex.api.sampling import Grammar
from loraplex.errors import InvalidRequest, LoraplexError, Unavailable
from loraplex.refs import check_digest
from loraplex_services.common.telemetry.tracing import Tracer
from loraplex_services.worker.adapters.fetch.disk_cache import DiskCache
from loraplex_services.worker.adapters.fetch.source import AdapterSource
from loraplex_services.worker.grammars.checker import GrammarChecker
from loraplex_services.worker.server import metrics
from loraplex_services.worker.server.adapter_fetcher import AdapterFetcher
from loraplex_services.worker.server.base_files import TokenizerBundle
from loraplex_services.worker.server.crash_guard import CrashGuard, crash_key
from loraplex_services.worker.server.debug_state import worker_state
from loraplex_services.worker.server.engine_client import EngineClient
from loraplex_services.worker.server.sessions import (
    GatewaySession,
    ServerRequest,
    ServerRequests,
    SessionUpdate,
)
from loraplex_services.worker.server.spans import end_span
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.server.validation import IntakeLimits, check_request
from loraplex_services.worker.types.messages import (
    Cancel,
    EngineReady,
    Gone,
    StepOutput,
    Submit,
    TokenOutput,
)
from loraplex_services.worker.types.runner_protocol import ModelInfo

logger = logging.getLogger(__name__)


class ApiServer:
    """Validates requests, passes them to the engine and hands their tokens to sessions."""

    def __init__(
        self,
        status: StatusBoard,
        max_adapters: int,
        on_ready: Callable[[], None],
        tracer: Tracer,
    ) -> None:
        """`max_adapters` bounds one request; `on_ready` is called when readiness may have
        changed."""
        self.status = status
        self._max_adapters = max_adapters
        self._on_ready = on_ready
        self._tracer = tracer
        self._client: EngineClient
        self._engine_state: Callable[[], dict[str, Any]] = lambda: {"is_up": False}
        self._fetcher: AdapterFetcher
        self._bundle: TokenizerBundle
        self._grammars: GrammarChecker
        self._engine: EngineReady | None = None
        self._live = ServerRequests()
        self._sessions: set[GatewaySession] = set()
        self._session_ids = itertools.count(1)
        self._guard = CrashGuard()
        self._suspects: list[bytes] = []
        """Requests that the last engine was computing when it died."""
        self._num_preemptions = 0
        """Number of preemptions, as the engine counts them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def connect(
        self,
        client: EngineClient,
        source: AdapterSource,
        disk: DiskCache,
        bundle: TokenizerBundle,
        grammars: GrammarChecker,
    ) -> None:
        """Add the components that need this object. Requests can run only afterwards."""
        self._client, self._bundle, self._grammars = client, bundle, grammars
        self._engine_state = client.state
        self._fetcher = AdapterFetcher(self.status, client, source, disk, self._spawn)

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live)

    def debug_state(self) -> dict[str, Any]:
        """The state of the worker, for /debug/state."""
        engine = self._engine_state()
        return worker_state(self.status, engine, self._sessions, self._live, time.monotonic())

    def model(self) -> tuple[ModelInfo, TokenizerBundle]:
        """The base. Raises Unavailable while the engine starts."""
        return self._running().info, self._bundle

    def open_session(self, gateway_id: str) -> GatewaySession:
        """A session for the stream of one gateway. Raises Unavailable while the engine starts."""
        self._running()
        session = GatewaySession(next(self._session_ids), gateway_id)
        self._sessions.add(session)
        return session

    def close_session(self, session: GatewaySession) -> None:
        """End a session and cancel its running requests."""
        self._sessions.discard(session)
        for request_id in list(session.live):
            self.cancel(session, request_id)

    def submit(self, session: GatewaySession, message: WorkerRequest) -> None:
        """Start a request. A refusal is a failure among the session's events."""
        try:
            self._submit(session, message)
        except LoraplexError as error:
            update = SessionUpdate(self.status.load.steps, failures=[(message.request_id, error)])
            session.push(update)

    def cancel(self, session: GatewaySession, request_id: str) -> None:
        """End a request without an answer."""
        key = session.live.get(request_id)
        if key is None:
            return
        request = self._live.get(key)
        if request is not None and request.grammar_check is not None:
            request.grammar_check.cancel()
        self._end(key, "cancelled")
        metrics.count_end("cancelled")
        if self._client.is_up:
            self._client.send(Cancel(key))

    async def load(self, digest: str, pin: bool, *, when_fetched: bool = False) -> AdapterResidency:
        """Fetch and load an adapter ahead of requests: see `AdapterFetcher.load`."""
        check_digest(digest)
        self._running()
        return await self._fetcher.load(digest, pin, when_fetched=when_fetched)

    def unpin(self, digest: str) -> AdapterResidency:
        """Release a pin."""
        check_digest(digest)
        self._running()
        self._fetcher.unpin(digest)
        return dataclasses.replace(self.status.adapter(digest), pinned=False)

    def unload(self, digest: str) -> None:
        """Free an adapter as soon as no request uses it."""
        check_digest(digest)
        self._running()
        self._fetcher.unload(digest)

    def drain(self) -> None:
        """Refuse new requests; running ones finish."""
        self.status.is_draining = True
        self._tell_ready()

    def adapter_gone(self, digest: str) -> None:
        """Note that the disk cache is about to delete an adapter."""
        self.status.off_disk(digest)
        if self._engine is not None and self._client.is_up:
            self._client.send(Gone(digest))

    def engine_up(self, ready: EngineReady, epoch: int) -> None:
        """Accept requests: an engine is ready."""
        self._engine = ready
        self._fetcher.engine_up(ready, epoch)
        self._tell_ready()

    def engine_output(self, output: StepOutput) -> None:
        """Pass the results of one step to sessions and watchers."""
        metrics.observe_preemptions(self._num_preemptions, output.preemptions)
        self._num_preemptions = output.preemptions
        self.status.update(output.residency, output.load)
        metrics.observe_load(output, len(self._sessions))
        updates = self._live.sort_out(output.step, output.tokens, output.failures)
        found = [(self._live.get(token.request_id), token) for token in output.tokens]
        new = [(r, t) for r, t in found if r is not None and (t.token_ids or t.finish_reason)]
        metrics.observe_step(new, time.monotonic())
        for request, token in new:
            request.first_step = request.first_step or output.step
            self._guard.settled(token.request_id)
            if token.finish_reason:
                self._guard.finished(request.crash_key)
                self._end(token.request_id, "ok", token, output.step)
        for failure in output.failures:
            if self._end(failure.request_id, failure.error.reason.lower()):
                metrics.count_end("error")
        for session, part in updates.items():
            session.push(part)
        self._fetcher.residency_changed(output.residency)

    def engine_down(self, error: LoraplexError) -> None:
        """Fail all requests: the engine is lost."""
        self._engine = None
        self._tell_ready()
        self.status.fail_waiters(error)
        self._guard.engine_lost()
        requests = self._live.clear()
        self._suspects = [r.crash_key for r in requests if r.has_entered]
        for request in requests:
            if request.grammar_check is not None:
                request.grammar_check.cancel()
            self._fetcher.release(request.digests)
            end_span(request, error.reason.lower())
        self._idle.set()
        for session in self._sessions:
            session.end(error)

    def engine_entered(self, request_ids: list[str]) -> None:
        """Record the requests that may from now on crash the engine."""
        for request_id in request_ids:
            if (request := self._live.get(request_id)) is not None:
                request.has_entered = True

    def prefetch_copied(self, digest: str, device_bytes: int) -> None:
        """Tell the waiters for an adapter before the current step has ended."""
        self.status.arrived(digest, device_bytes)

    def engine_crashed(self) -> None:
        """Suspect the requests that the engine was computing when it crashed."""
        logger.error("engine crashed", extra={"num_suspects": len(self._suspects)})
        self._guard.crashed(self._suspects)

    async def finish(self) -> None:
        """Drain, then end all streams, so that the server can stop."""
        self.drain()
        await self._idle.wait()
        for session in self._sessions:
            session.end(Unavailable("the worker stops", reason="DRAINING", retry_after_s=1.0))
        self.status.close()

    def close(self) -> None:
        """Stop background work."""
        for task in list(self._tasks):
            task.cancel()

    def _running(self) -> EngineReady:
        if self._engine is None:
            raise Unavailable("the model is loading", reason="NOT_READY", retry_after_s=1.0)
        return self._engine

    def _submit(self, session: GatewaySession, message: WorkerRequest) -> None:
        if self.status.is_draining:
            raise Unavailable("the worker is draining", reason="DRAINING", retry_after_s=1.0)
        info = self._running().info
        routes = info.routing is not None
        limits = IntakeLimits(info.vocab_size, info.max_model_len, self._max_adapters, routes)
        check_request(message, limits)
        if message.request_id in session.live:
            raise InvalidRequest.field("request_id", message.request_id, "is already running")
        digests = message.adapters.digests
        crash = crash_key(message.prompt_ids, message.adapters)
        self._guard.check(crash)
        metrics.observe_submit(message.sampling.max_tokens)
        came_s = time.monotonic()
        num_prompt = len(message.prompt_ids)
        request = ServerRequest(session, message.request_id, digests, num_prompt, came_s, crash)
        request.span = self._tracer.begin("worker request", message.trace, came_s)
        key = self._live.add(request)
        self._idle.clear()
        self._fetcher.lease(digests)
        submit = Submit(request=replace(message, request_id=key), came_s=came_s)
        if message.grammar is None:
            self._pass_on(key, submit)
        else:
            work = self._pass_on_checked(key, request, submit, message.grammar)
            request.grammar_check = self._spawn(work)

    def _pass_on(self, key: str, submit: Submit) -> None:
        """Pass a request to the engine, with the state of its adapters."""
        request = self._live.get(key)
        assert request is not None, "passed on after its end"
        self._guard.admit(key, request.crash_key, lambda: self._client.send(submit))
        for digest in request.digests:
            self._fetcher.ensure_loaded(digest)

    async def _pass_on_checked(
        self, key: str, request: ServerRequest, submit: Submit, grammar: Grammar
    ) -> None:
        """Pass the request on once its grammar has been checked, unless the request has ended in
        the meantime."""
        fault: LoraplexError | None = None
        try:
            info = self._running().info
            tenant = submit.request.tenant
            eos_ids = info.eos_token_ids
            checked = await self._grammars.check(grammar, info.vocab_size, eos_ids, tenant)
            if self._live.get(key) is request:
                message = replace(submit.request, grammar=checked)
                self._pass_on(key, Submit(request=message, came_s=submit.came_s))
        except LoraplexError as error:
            fault = error
        except Exception:  # without an answer, the request would wait until its deadline
            logger.exception("grammar check broke", extra={"request_id": request.request_id})
            fault = LoraplexError("internal error: the worker's log has the traceback")
        if fault is not None and self._live.get(key) is request:
            self._end(key, fault.reason.lower())
            metrics.count_end("error")
            update = SessionUpdate(self.status.load.steps, failures=[(request.request_id, fault)])
            request.session.push(update)

    def _end(
        self, key: str, outcome: str, last: TokenOutput | None = None, last_step: int = 0
    ) -> bool:
        """Forget a request; False if it has ended before. `last`: its last output, of that step."""
        request = self._live.remove(key)
        if request is None:
            return False
        end_span(request, outcome, last, last_step)
        self._guard.settled(key)
        self._fetcher.release(request.digests)
        if not len(self._live):
            self._idle.set()
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell_ready(self) -> None:
        self.status.is_ready = self._engine is not None and not self.status.is_draining
        self.status.touch()
        self._on_ready()
