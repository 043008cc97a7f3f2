"""The messages that wait to be sent to a worker: notices first, then the jobs of tenants in
rotation.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass

from loraplex.v1 import worker_pb2
from loraplex_services.gateway.request import WorkerJob


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job whose message is not built yet: until then, all choices of a request share one
    prompt, where each message has a copy."""

    wire_id: str
    job: WorkerJob


class Outbox:
    """Unbounded in jobs, which admission bounds. One tenant's jobs do not delay another's."""

    def __init__(self) -> None:
        self._notices: deque[worker_pb2.SessionRequest] = deque()
        self._jobs: OrderedDict[str, deque[QueuedJob]] = OrderedDict()
        """Jobs by tenant; the tenant that is next comes first. No empty entries."""
        self._is_filled = asyncio.Event()

    def put_notice(self, message: worker_pb2.SessionRequest) -> None:
        """Queue an acknowledgement or a cancellation."""
        self._notices.append(message)
        self._is_filled.set()

    def put_job(self, wire_id: str, job: WorkerJob) -> None:
        """Queue a job."""
        self._jobs.setdefault(job.request.tenant, deque()).append(QueuedJob(wire_id, job))
        self._is_filled.set()

    async def next(self) -> worker_pb2.SessionRequest | QueuedJob:
        """Take what is to be sent next, when there is something."""
        await self._is_filled.wait()
        taken = self._notices.popleft() if self._notices else self._next_job()
        if not (self._notices or self._jobs):
            self._is_filled.clear()
        return taken

    def _next_job(self) -> QueuedJob:
        tenant, jobs = next(iter(self._jobs.items()))
        taken = jobs.popleft()
        self._jobs.move_to_end(tenant)
        if not jobs:
            del self._jobs[tenant]
        return taken
