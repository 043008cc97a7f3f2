"""Runs one job to its end and continues it on another worker if its worker fails.

Before the first token, a failed job is submitted to another worker. After it, the job is submitted
again with the tokens already seen as `output_ids`. All sampling state is a function of those
tokens, so the other worker continues exactly where the first one stopped and the reader sees one
stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from loraplex.api.output import FinishReason
from loraplex.api.request import KeptPrefix, WorkerRequest
from loraplex.errors import DeadlineExceeded, LoraplexError, Unavailable
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.metrics import CONTINUATIONS, RETRIES
from loraplex_services.gateway.request import Tokens, WorkerJob
from loraplex_services.gateway.routing.routed_parts import RoutedParts
from loraplex_services.gateway.routing.router import ReplicaCounts, RoutingRequest, choose
from loraplex_services.gateway.routing.steering import Interrupted, Steering
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.token_stream import TokenStream
from loraplex_services.gateway.workers.view import WorkerView

logger = logging.getLogger(__name__)

_MAX_KEPT = 256
"""Switches after which a prefix is computed again."""
_NO_WORKER = "NO_READY_WORKER"
_BACK_OFF_S, _MOST_BACK_OFF_S = 0.05, 1.0
"""The pause doubles with each consecutive failure; it is used only if every worker has been
tried."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """How long the relay retries."""

    max_failures: int = 5
    """Most consecutive failures without a new token."""
    wait_for_worker_s: float = 30.0
    """How long an accepted request waits for a worker to return, and how long a stream that has
    begun is retried, in seconds."""


class RelayedJob:
    """One job and its attempts on workers."""

    def __init__(
        self,
        workers: Fleet,
        limits: RelayLimits,
        job: WorkerJob,
        request: RoutingRequest,
        steering: Steering,
    ) -> None:
        self._steering = steering
        self._kept: list[KeptPrefix] = []
        """Prefixes that earlier adapters computed, if the request keeps them."""
        self._workers = workers
        self._limits = limits
        self._job = job
        self._proven = job.request.adapters
        """The adapters that chose the last token, or those with which the request began."""
        self._request = request
        self._emitted: list[int] = []
        self._routed = RoutedParts(job.request)
        self._failures = 0
        """Attempts that failed since the last new token."""
        self._progress_s = now_s()
        self._tried: set[str] = set()
        """Addresses of the workers tried since then."""
        self._last = ""
        """Address of the last worker tried."""
        self._stays = False
        """Whether the next attempt goes to the same worker, where its prefix is cached."""

    async def tokens(self) -> AsyncGenerator[Tokens]:
        """Yield each position once and in order. Raises: LoraplexError."""
        while True:
            try:
                await self._steering.until_running(self._job.deadline_s)
                if self._steering.is_aborted:
                    break
                self._follow()
                view = await self._pick()
                async with aclosing(self._attempt(view)) as events:
                    async for tokens in events:
                        yield tokens
                        if tokens.finish_reason is not None:
                            return
            except Interrupted:
                self._tried.discard(self._last)
                self._stays = True
            except Unavailable as error:
                await self._recover(error)
            except LoraplexError as error:
                self._go_back(error)
        yield Tokens((), len(self._emitted), finish_reason=FinishReason.ABORT)

    def _follow(self) -> None:
        """Switch to the adapters that the request is to run with from now on."""
        request, adapters = self._job.request, self._steering.adapters
        if request.adapters == adapters:
            return
        if self._steering.keeps_prefix and len(self._kept) < _MAX_KEPT:
            # The KV of the last token was not computed yet.
            num_tokens = len(request.prompt_ids) + len(self._emitted) - 1
            if not self._kept or self._kept[-1].num_tokens < num_tokens:
                self._kept.append(KeptPrefix(request.adapters, num_tokens))
        else:
            self._kept.clear()
        request = replace(request, adapters=adapters, kept=tuple(self._kept))
        self._job = replace(self._job, request=request)
        self._request = replace(self._request, key=_replica_key(request), digests=adapters.digests)

    async def _attempt(self, view: WorkerView) -> AsyncGenerator[Tokens]:
        """Yield the new tokens of one attempt. Raises: LoraplexError."""
        stream = self._submit(view)
        left_s = self._job.deadline_s - now_s()
        timer = asyncio.get_running_loop().call_later(left_s, stream.fail, _deadline_passed())
        adapters = self._job.request.adapters

        def end(error: LoraplexError) -> None:
            stream.fail(error)
            stream.cancel()

        try:
            with self._steering.attempt(view.address, adapters, end) as attempt:
                while True:
                    tokens = self._new_part(await stream.next())
                    if tokens is not None:
                        attempt.has_tokens = True
                        yield tokens
        finally:
            timer.cancel()
            stream.cancel()

    def _submit(self, view: WorkerView) -> TokenStream:
        self._last = view.address
        self._tried.add(view.address)
        self._request = replace(self._request, numerics=view.numerics)
        return self._workers.submit(view.address, self._continued())

    def _continued(self) -> WorkerJob:
        """The job with the tokens emitted so far, then without prompt logprobs."""
        routed_from = self._routed.restart()
        if not self._emitted:
            return self._job
        request = self._job.request
        sampling = replace(request.sampling, prompt_logprobs=None)
        request = replace(
            request,
            output_ids=tuple(self._emitted),
            sampling=sampling,
            routed_from=routed_from,
        )
        return replace(self._job, request=request)

    def _new_part(self, tokens: Tokens) -> Tokens | None:
        """The part of an event that is new; None if nothing is. Raises: Unavailable on a gap."""
        seen = len(self._emitted) - tokens.position
        if seen < 0:
            raise Unavailable("the worker skipped a position", reason="PROTOCOL")
        if tokens.finish_reason is FinishReason.CANCELLED:
            raise Unavailable("the worker cancelled the request", reason="WORKER_CANCELLED")
        if seen:
            tokens = replace(
                tokens,
                token_ids=tokens.token_ids[seen:],
                logprobs=tokens.logprobs[seen:],
                position=len(self._emitted),
            )
        self._routed.add(tokens.routed_experts)
        if not tokens.token_ids and tokens.finish_reason is None:
            return None
        if tokens.token_ids:
            num_output = len(self._emitted) + len(tokens.token_ids)
            tokens = replace(tokens, routed_experts=self._routed.take(num_output))
            self._proven = self._job.request.adapters
        self._emitted.extend(tokens.token_ids)
        if self._failures:
            self._failures = 0
            self._tried.clear()
        return tokens

    def _go_back(self, error: LoraplexError) -> None:
        """Continue as before the last switch: a worker may be unable to load the new adapters
        although it has fetched them, and if it dies, other workers may be unable to fetch them.

        Raises: the error, if it cannot come from a switch.
        """
        failed = self._job.request.adapters
        if failed == self._proven or isinstance(error, DeadlineExceeded):
            raise error
        logger.warning(
            "switch failed; the request continues with its earlier version",
            extra={"reason": error.reason},
        )
        if self._steering.adapters == failed:
            self._steering.switch(self._proven)
        self._stays = True

    async def _recover(self, error: Unavailable) -> None:
        """Prepare another attempt, or raise the error if there should be none."""
        self._failures += 1
        if self._failures == 1:
            self._progress_s = now_s()
        if error.reason == _NO_WORKER:
            raise error
        next_view = self._choose()
        all_tried = next_view is not None and next_view.address in self._tried
        gives_up = self._should_give_up()
        if (all_tried or gives_up) and self._job.request.adapters != self._proven:
            return self._go_back(error)
        if gives_up:
            raise error
        (CONTINUATIONS if self._emitted else RETRIES).inc()
        if all_tried:
            self._tried = {self._last}
            await asyncio.sleep(min(_BACK_OFF_S * 2**self._failures, _MOST_BACK_OFF_S))

    def _should_give_up(self) -> bool:
        """A stream that has begun gets more attempts than one that has not."""
        if self._failures <= self._limits.max_failures:
            return False
        return not self._emitted or now_s() - self._progress_s > self._limits.wait_for_worker_s

    async def _pick(self) -> WorkerView:
        """The worker for the next attempt.

        A new job fails at once if no worker is ready; one that was accepted before waits.
        """
        view = self._choose()
        if view is None and (self._last or self._emitted):
            view = await self._wait_for_worker()
        if view is None:
            raise Unavailable(
                f"no worker of {self._job.base_id!r} is ready; retry shortly",
                reason=_NO_WORKER,
                retry_after_s=1.0,
            )
        return view

    def _choose(self) -> WorkerView | None:
        """A worker that was not tried since the last new token, or else any."""
        views = self._workers.views(self._job.base_id)
        if self._stays:
            self._stays = False
            same = [v for v in views if v.address == self._last and v.takes_requests]
            if same:
                return same[0]
        others = [view for view in views if view.address not in self._tried]
        return choose(others, self._request) or choose(views, self._request)

    async def _wait_for_worker(self) -> WorkerView | None:
        job = self._job
        left_s = (job.deadline_s if self._emitted else job.start_by_s) - now_s()
        try:
            async with asyncio.timeout(min(self._limits.wait_for_worker_s, left_s)):
                while (view := self._choose()) is None:
                    await self._workers.next_change()
        except TimeoutError:
            # The clock is not read again: rounding may put it just before the deadline.
            if left_s <= self._limits.wait_for_worker_s:
                raise _deadline_passed() from None
            return None
        return view


def _deadline_passed() -> LoraplexError:
    return DeadlineExceeded("the deadline passed while the request was running")


class Relay:
    """Runs jobs on workers and continues them after failures."""

    def __init__(self, workers: Fleet, limits: RelayLimits | None = None) -> None:
        self._workers = workers
        self._limits = limits or RelayLimits()
        self._replica_counts = ReplicaCounts()

    @property
    def num_running(self) -> int:
        """Running jobs on adapters."""
        return self._replica_counts.total

    async def stream(
        self, job: WorkerJob, steering: Steering | None = None
    ) -> AsyncGenerator[Tokens]:
        """Tokens of a job, each position once and in order, until one event has a finish reason.
        `steering` may change the job in the meantime.

        Closing the iterator cancels the job at its worker.

        Raises: Unavailable if no worker is ready, DeadlineExceeded, or the worker's own error.
        """
        key, digests = _replica_key(job.request), job.request.adapters.digests
        num_workers = len(self._workers.views(job.base_id))
        num_replicas = self._replica_counts.start(key, num_workers) if digests else 0
        request = RoutingRequest(key, digests, len(job.request.prompt_ids), num_replicas)
        try:
            steering = steering or Steering(job.request.adapters)
            run = RelayedJob(self._workers, self._limits, job, request, steering)
            async with aclosing(run.tokens()) as events:
                async for tokens in events:
                    yield tokens
        finally:
            if digests:
                self._replica_counts.end(key)


def _replica_key(request: WorkerRequest) -> str:
    """Adapters are routed by digest; requests to the base are spread by their own id."""
    if digests := request.adapters.digests:
        return "+".join(digests)
    return f"{request.request_id}.{request.sample_index}"
