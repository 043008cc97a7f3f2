"""One job from submission to its end, whatever happens to workers meanwhile.

Before the first token, a failed job is submitted to another worker. After it, the job is submitted
again with the tokens already seen as `output_ids`. All sampling state is a function of those
tokens, so the other worker continues exactly where the first one stopped and the reader sees one
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from loraplex.errors import DeadlineExceeded, LoraplexError, Unavailable
from services.gateway.event_loop import now_s
from services.gateway.metrics import CONTINUATIONS, RETRIES
from services.gateway.request import FinishReason, Job, Tokens
from services.gateway.routing.router import HomeSizes, Placement, choose
from services.gateway.workers.token_stream import TokenStream
from services.gateway.workers.view import WorkerView

_NO_WORKER = "NO_READY_WORKER"
_BACK_OFF_S, _MOST_BACK_OFF_S = 0.05, 1.0
"""Doubled at each failure in a row; only where no other worker could be tried instead."""


class Workers(Protocol):
    """The fleet, as far as the relay needs it."""

    def views(self, base_id: str | None = None) -> list[WorkerView]: ...

    def submit(self, address: str, job: Job) -> TokenStream: ...

    async def next_change(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """How long the relay keeps trying."""

    max_failures: int = 5
    """Placements that may fail one after another without a new token in between."""
    wait_for_worker_s: float = 30.0
    """How long an accepted request waits for some worker to come back, and how long a stream that
    has begun is placed again and again."""


class Placing:
    """One job on its way through the workers."""

    def __init__(
        self, workers: Workers, limits: RelayLimits, job: Job, placement: Placement
    ) -> None:
        self._workers = workers
        self._limits = limits
        self._job = job
        self._placement = placement
        self._emitted: list[int] = []
        self._failures = 0
        """Placements that failed since the last new token."""
        self._progress_s = now_s()
        self._tried: set[str] = set()
        """Addresses of the workers that failed since then."""
        self._last = ""
        """Address of the newest placement."""

    async def tokens(self) -> AsyncGenerator[Tokens]:
        """Each position once and in order. Raises: LoraplexError."""
        while True:
            try:
                view = await self._pick()
                async with aclosing(self._placed(view)) as events:
                    async for tokens in events:
                        yield tokens
                        if tokens.finish_reason is not None:
                            return
            except Unavailable as error:
                await self._recover(error)

    async def _placed(self, view: WorkerView) -> AsyncGenerator[Tokens]:
        """New tokens from one placement. Raises: LoraplexError."""
        stream = self._submit(view)
        left_s = self._job.deadline_s - now_s()
        timer = asyncio.get_running_loop().call_later(left_s, stream.fail, _deadline_passed())
        try:
            while True:
                tokens = self._new_part(await stream.next())
                if tokens is not None:
                    yield tokens
        finally:
            timer.cancel()
            stream.cancel()

    def _submit(self, view: WorkerView) -> TokenStream:
        self._last = view.address
        self._tried.add(view.address)
        self._placement = replace(self._placement, numerics=view.numerics)
        return self._workers.submit(view.address, self._continued())

    def _continued(self) -> Job:
        """The job as it stands: with the tokens already out, without prompt logprobs."""
        if not self._emitted:
            return self._job
        sampling = replace(self._job.sampling, prompt_logprobs=None)
        return replace(self._job, output_ids=tuple(self._emitted), sampling=sampling)

    def _new_part(self, tokens: Tokens) -> Tokens | None:
        """What of an event was not seen yet. Mutates: emitted. Raises: Unavailable on a gap."""
        seen = len(self._emitted) - tokens.position
        if seen < 0:
            raise Unavailable("the worker skipped a position", reason="PROTOCOL")
        if tokens.finish_reason is FinishReason.CANCELLED:
            raise Unavailable("the worker gave the request up", reason="WORKER_CANCELLED")
        if seen:
            tokens = replace(
                tokens,
                token_ids=tokens.token_ids[seen:],
                logprobs=tokens.logprobs[seen:],
                position=len(self._emitted),
            )
        if not tokens.token_ids and tokens.finish_reason is None:
            return None
        self._emitted.extend(tokens.token_ids)
        if self._failures:
            self._failures = 0
            self._tried.clear()
        return tokens

    async def _recover(self, error: Unavailable) -> None:
        """Make ready for another placement. Raises: the error when that is not worth it."""
        self._failures += 1
        if self._failures == 1:
            self._progress_s = now_s()
        if error.reason == _NO_WORKER or self._is_hopeless():
            raise error
        (CONTINUATIONS if self._emitted else RETRIES).inc()
        next_view = self._choose()
        if next_view is not None and next_view.address in self._tried:
            self._tried = {self._last}
            await asyncio.sleep(min(_BACK_OFF_S * 2**self._failures, _MOST_BACK_OFF_S))

    def _is_hopeless(self) -> bool:
        """A stream that has begun is worth more tries than one that has not."""
        if self._failures <= self._limits.max_failures:
            return False
        return not self._emitted or now_s() - self._progress_s > self._limits.wait_for_worker_s

    async def _pick(self) -> WorkerView:
        """The worker for the next placement.

        A fresh job fails at once when nobody is ready; one that was accepted waits for a while.
        """
        view = self._choose()
        if view is None and (self._last or self._emitted):
            view = await self._wait_for_worker()
        if view is None:
            raise Unavailable(
                f"no worker of {self._job.base_id!r} is ready; try again shortly",
                reason=_NO_WORKER,
                retry_after_s=1.0,
            )
        return view

    def _choose(self) -> WorkerView | None:
        """A worker that was not tried since the last new token, else any."""
        views = self._workers.views(self._job.base_id)
        others = [view for view in views if view.address not in self._tried]
        return choose(others, self._placement) or choose(views, self._placement)

    async def _wait_for_worker(self) -> WorkerView | None:
        job = self._job
        left_s = (job.deadline_s if self._emitted else job.start_by_s) - now_s()
        try:
            async with asyncio.timeout(min(self._limits.wait_for_worker_s, left_s)):
                while (view := self._choose()) is None:
                    await self._workers.next_change()
        except TimeoutError:
            # Not asked of the clock: rounding may put it just before the deadline.
            if left_s <= self._limits.wait_for_worker_s:
                raise _deadline_passed() from None
            return None
        return view


def _deadline_passed() -> LoraplexError:
    return DeadlineExceeded("the request ran into its deadline")


class Relay:
    """Places jobs on workers and keeps them going."""

    def __init__(self, workers: Workers, limits: RelayLimits | None = None) -> None:
        self._workers = workers
        self._limits = limits or RelayLimits()
        self._homes = HomeSizes()

    @property
    def num_running(self) -> int:
        """Jobs on adapters that have not ended."""
        return self._homes.total

    async def stream(self, job: Job) -> AsyncGenerator[Tokens]:
        """Tokens of a job, each position once and in order, until one event has a finish reason.

        Closing the iterator cancels the job at its worker.

        Raises: Unavailable when no worker is ready, DeadlineExceeded, or the worker's own error.
        """
        key = _home_key(job)
        num_workers = len(self._workers.views(job.base_id))
        homes = self._homes.start(key, num_workers) if job.adapters else 0
        placement = Placement(
            key, tuple(a.digest for a in job.adapters), len(job.prompt_ids), homes
        )
        try:
            run = Placing(self._workers, self._limits, job, placement)
            async with aclosing(run.tokens()) as events:
                async for tokens in events:
                    yield tokens
        finally:
            if job.adapters:
                self._homes.end(key)


def _home_key(job: Job) -> str:
    """Adapters are placed by digest; requests of the base spread by their own id."""
    if job.adapters:
        return "+".join(adapter.digest for adapter in job.adapters)
    return f"{job.request_id}.{job.sample_index}"
