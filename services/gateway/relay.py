"""One job from submission to its end, whatever happens to workers meanwhile.

Before the first token a failed placement is simply tried elsewhere. After it the job is submitted
again with the tokens already seen as `output_ids`: all sampling state is a function of them, so
another worker goes on exactly where the first stopped and the reader sees one unbroken stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from loraplex.errors import DeadlineExceeded, LoraplexError, Unavailable
from services.gateway.clock import now_s
from services.gateway.metrics import CONTINUATIONS, RETRIES
from services.gateway.request import FinishReason, Job, Tokens
from services.gateway.routing import HomeSizes, Placement, choose
from services.gateway.token_stream import TokenStream
from services.gateway.view import WorkerView

_NO_WORKER = "NO_READY_WORKER"
_BACK_OFF_S = 0.05
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
    """How long an accepted request waits for some worker to come back."""


class Relay:
    """Places jobs on workers and keeps them going."""

    def __init__(self, workers: Workers, limits: RelayLimits = RelayLimits()) -> None:
        self._workers = workers
        self._limits = limits
        self._homes = HomeSizes()

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
            run = _Run(self._workers, self._limits, job, placement)
            async with aclosing(run.tokens()) as events:
                async for tokens in events:
                    yield tokens
        finally:
            if job.adapters:
                self._homes.end(key)


class _Run:
    """The placements of one job, one after another."""

    def __init__(
        self, workers: Workers, limits: RelayLimits, job: Job, placement: Placement
    ) -> None:
        self._workers = workers
        self._limits = limits
        self._job = job
        self._placement = placement
        self._emitted: list[int] = []
        self._failures = 0
        self._avoid = ""
        """Address of the worker that failed last."""

    async def tokens(self) -> AsyncGenerator[Tokens]:
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
        self._avoid = view.address
        self._placement = replace(self._placement, numerics=view.numerics)
        stream = self._workers.submit(view.address, self._continued())
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._job.deadline_s - now_s(), stream.fail, _deadline_passed())
        try:
            while True:
                tokens = self._new_part(await stream.next())
                if tokens is not None:
                    yield tokens
        finally:
            timer.cancel()
            stream.cancel()

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
        self._failures = 0
        return tokens

    async def _recover(self, error: Unavailable) -> None:
        """Make ready for another placement. Raises: the error when that is not worth it."""
        self._failures += 1
        if error.reason == _NO_WORKER or self._failures > self._limits.max_failures:
            raise error
        (CONTINUATIONS if self._emitted else RETRIES).inc()
        next_view = self._choose()
        if next_view is not None and next_view.address == self._avoid:
            await asyncio.sleep(_BACK_OFF_S * 2**self._failures)

    async def _pick(self) -> WorkerView:
        """The worker for the next placement.

        A fresh job fails at once when nobody is ready; one that was accepted waits for a while.
        """
        view = self._choose()
        if view is None and (self._avoid or self._emitted):
            view = await self._wait_for_worker()
        if view is None:
            raise Unavailable(
                f"no worker of {self._job.base_id!r} is ready; try again shortly",
                reason=_NO_WORKER,
                retry_after_s=1.0,
            )
        return view

    def _choose(self) -> WorkerView | None:
        views = self._workers.views(self._job.base_id)
        others = [view for view in views if view.address != self._avoid]
        return choose(others, self._placement) or choose(views, self._placement)

    async def _wait_for_worker(self) -> WorkerView | None:
        wait_s = min(self._limits.wait_for_worker_s, self._job.deadline_s - now_s())
        try:
            async with asyncio.timeout(wait_s):
                while (view := self._choose()) is None:
                    await self._workers.next_change()
        except TimeoutError:
            if now_s() >= self._job.deadline_s:
                raise _deadline_passed() from None
            return None
        return view


def _home_key(job: Job) -> str:
    """Adapters are placed by digest; requests of the base spread by their own id."""
    if job.adapters:
        return "+".join(adapter.digest for adapter in job.adapters)
    return f"{job.request_id}.{job.sample_index}"


def _deadline_passed() -> LoraplexError:
    return DeadlineExceeded("the request ran into its deadline")
