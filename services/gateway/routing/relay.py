"""One job from submission to its end, whatever happens to workers meanwhile.

Before the first token, a failed job is submitted to another worker. After it, the job is submitted
again with the tokens already seen as `output_ids`. All sampling state is a function of those
tokens, so the other worker continues exactly where the first one stopped and the reader sees one
stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.gateway.request import Job, Tokens
from services.gateway.routing.placing import Placing, RelayLimits, Workers
from services.gateway.routing.router import HomeSizes, Placement


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
