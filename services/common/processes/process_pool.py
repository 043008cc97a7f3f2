"""A pool of processes for work on untrusted input: templates, grammars, tokenizers, headers.

Such input can take long, need much memory or crash the library that reads it. Each job runs in a
process with a memory limit and a time limit, tenants get the processes in rotation, and a job that
ran out of time or killed its process is refused for a while without running again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Hashable
from typing import Any

from loraplex.errors import LoraplexError, ResourceExhausted, Unavailable
from loraplex_services.common.limits import PoolLimits
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.common.processes.job_process import FRAME, MAX_FRAME_BYTES
from loraplex_services.common.processes.piped_process import start_module
from loraplex_services.common.tenant_slots import TenantSlots

logger = logging.getLogger(__name__)

SPARE_AFTER_S = 0.2
"""While a job takes longer than this, in seconds, another process is kept ready."""
REFUSED_S = 30.0
"""Seconds for which a job is refused after it failed."""
PAUSE_FACTOR = 4.0
"""A tenant whose job cost its process keeps the slot for this many times the duration of the job.
Its hard jobs therefore take a fifth of a core, in addition to the starts of processes."""
MAX_PAUSE_S = 10.0
MAX_REFUSED = 1024
END_S = 5.0
"""Seconds that a process may take to end after it has closed its pipe."""
CLOSE_S = 10.0
"""Seconds for which `close` waits for processes that were killed."""


class JobFailed(Exception):
    """A job ran out of time or killed its process."""

    def __init__(self, *, is_late: bool, is_repeated: bool) -> None:
        super().__init__()
        self.is_late = is_late
        """True if it ran out of time."""
        self.is_repeated = is_repeated
        """True if it failed a moment ago and did not run again."""


class ProcessPool:
    """Runs jobs in processes of one module. They start when they are first needed. One more is kept
    ready while a long job runs, so that another tenant's job does not wait for a start."""

    def __init__(self, module: str, limits: PoolLimits, setup: bytes = b"") -> None:
        """`setup` is the first frame that each process gets."""
        self._module = module
        self._limits = limits
        self._setup = setup
        self._slots = TenantSlots(limits.num_processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        """All running processes, idle or not."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone = asyncio.Event()
        self._refused: LruCache[Hashable, tuple[float, bool]] = LruCache(MAX_REFUSED)
        """When each job failed, and whether it ran out of time."""
        self._answers: LruCache[Hashable, bytes] = LruCache(limits.num_answers)
        self._is_closed = False

    @property
    def has_idle(self) -> bool:
        """Whether a process waits for a job."""
        return bool(self._idle)

    async def ask(self, tenant: str, job: bytes, key: Hashable = None) -> bytes:
        """The answer to a job.

        Args:
            key: what the answer or failure is remembered by; None = nothing is remembered.

        Raises:
            JobFailed: it ran out of time or killed its process, now or a moment ago.
            ResourceExhausted: the tenant has too many jobs waiting, or waited too long.
            Unavailable: no process could be started.
        """
        if (known := self._known(key)) is not None:
            return known
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await self._slots.take(tenant, self._limits.work)
        except TimeoutError:
            raise ResourceExhausted(
                f"all processes for {self._limits.work} are busy; try again",
                reason="POOL_BUSY",
                retry_after_s=1.0,
            ) from None
        process, begin_s = None, _now_s()
        try:
            if (known := self._known(key)) is not None:  # in the meantime
                return known
            process = self._idle_one() or await self._started()
            answer = await self._answer(process, job, key)
            if key is not None:
                self._answers.put(key, answer)
            return answer
        except BaseException:
            if process is not None:
                self._kill(process)
            raise
        finally:
            self._release(tenant, process, _now_s() - begin_s)

    async def close(self) -> None:
        """End all processes, and wait for at most `CLOSE_S` until they are gone."""
        self._is_closed = True
        while self._idle:
            self._kill(self._idle.pop())
        for process in self._all:
            process.kill()  # the caller that waits for its answer collects it
        if self._all or self._tasks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._gone.wait()
        for task in self._tasks:
            task.cancel()

    def _known(self, key: Hashable) -> bytes | None:
        """The answer, if it is remembered. Raises: JobFailed."""
        if key is None:
            return None
        failed = self._refused.get(key)
        if failed is not None and _now_s() - failed[0] < REFUSED_S:
            raise JobFailed(is_late=failed[1], is_repeated=True)
        return self._answers.get(key)

    async def _answer(
        self, process: asyncio.subprocess.Process, job: bytes, key: Hashable
    ) -> bytes:
        spare = asyncio.get_running_loop().call_later(SPARE_AFTER_S, self._add_spare)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await _exchange(process, job)
        except (TimeoutError, EOFError, OSError) as failure:
            if self._is_closed:
                raise Unavailable("the server stops", retry_after_s=1.0) from None
            is_late = isinstance(failure, TimeoutError) or await _ran_out_of_cpu(process)
            if key is not None:
                self._refused.put(key, (_now_s(), is_late))
            raise JobFailed(is_late=is_late, is_repeated=False) from None
        finally:
            spare.cancel()

    def _add_spare(self) -> None:
        """Start a process that waits for a job, if none waits already and a slot is free. The
        tenant without a name holds the slot in the meantime."""
        is_needed = self._limits.keeps_processes and not self.has_idle and not self._is_closed
        if is_needed and self._slots.take_free(""):
            self._run(self._replace(""))

    def _idle_one(self) -> asyncio.subprocess.Process | None:
        """A process that waited for a job, and no longer counts as idle; None if there is none."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._kill(process)
        return None

    async def _started(self) -> asyncio.subprocess.Process:
        """A new process. Its start does not count as time of the job."""
        if self._is_closed:
            raise Unavailable("the server stops", retry_after_s=1.0)
        failure = Unavailable(
            f"no process for {self._limits.work} could be started; try again",
            reason="PROCESS_FAILED",
            retry_after_s=1.0,
        )
        try:
            process = await start_module(self._module)
        except OSError as error:  # too many open files or processes, or too little memory
            logger.error(
                "process not started", extra={"work": self._limits.work, "error": str(error)}
            )
            raise failure from None
        self._all.add(process)
        if self._is_closed:  # in the meantime
            process.kill()
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                await _exchange(process, self._setup)
            if self._is_closed:  # killed after it had answered
                raise EOFError
        except (TimeoutError, EOFError, OSError):
            self._kill(process)
            raise failure from None
        except BaseException:
            self._kill(process)
            raise
        return process

    def _release(
        self, tenant: str, process: asyncio.subprocess.Process | None, took_s: float
    ) -> None:
        """Free the slot. Where the job cost its process, the tenant holds the slot until there is
        another, so that no other tenant waits for the start, and for a pause after that."""
        if process is None or self._is_closed:
            if process in self._all:
                self._kill(process)
            self._slots.give(tenant)
        elif process not in self._all:
            self._run(self._replace(tenant, min(PAUSE_FACTOR * took_s, MAX_PAUSE_S)))
        else:
            if self._limits.keeps_processes:
                self._idle.append(process)
            else:
                self._kill(process)
            self._slots.give(tenant)

    async def _replace(self, tenant: str, pause_s: float = 0.0) -> None:
        try:
            if self._limits.keeps_processes:
                self._idle.append(await self._started())
        except LoraplexError:
            pass  # the next job tries again and reports the reason
        finally:
            asyncio.get_running_loop().call_later(pause_s, self._slots.give, tenant)

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        """End a process at once, and collect its exit status in the background."""
        self._all.discard(process)
        if process.returncode is None:
            process.kill()
        self._run(_collect(process))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._is_closed and not self._all and not self._tasks:
            self._gone.set()


async def _collect(process: asyncio.subprocess.Process) -> None:
    await process.communicate()


async def _ran_out_of_cpu(process: asyncio.subprocess.Process) -> bool:
    """Whether a process that does not answer any more ended by the timer of its job.

    It is killed only if it does not end by itself: to kill a process that has ended makes Python
    collect its exit status where asyncio does not see it.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
    return await process.wait() == -signal.SIGPROF


async def _exchange(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
    """Send a frame and await its answer. Raises: EOFError, OSError if the process died."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(FRAME.pack(len(frame)))
    process.stdin.write(frame)
    await process.stdin.drain()
    (length,) = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
    if length > MAX_FRAME_BYTES:
        raise EOFError
    return await process.stdout.readexactly(length)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
