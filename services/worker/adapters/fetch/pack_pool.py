"""The pool of packing processes. One runs from the start; others start when they are needed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from loraplex.adapter_format.geometry import Geometry
from loraplex.errors import Unavailable
from loraplex_services.common.processes.piped_process import ask_line, start_module
from loraplex_services.worker.adapters.pack.pack_messages import PackJob, PackSetup, Prepared
from loraplex_services.worker.cores import usable_cores
from loraplex_services.worker.types.adapter_layout import AdapterLayout

logger = logging.getLogger(__name__)

MAX_PROCESSES = 4
"""Most processes. Each may use two cores, which leaves the engine its own."""
TIMEOUT_S = 120.0
"""Time limit in seconds for one adapter. Even the largest takes less on a busy machine."""
MAX_LINE_BYTES = 1 << 20


class PackPool:
    """Prepares adapters for one layout, several at a time.

    Unlike in a `ProcessPool`, nobody waits because another's job cost its process: on small
    machines there is only one.
    """

    def __init__(self, geometry: Geometry, layout: AdapterLayout) -> None:
        self.fingerprint = layout.fingerprint
        self._setup = msgspec.json.encode(PackSetup(geometry, layout)) + b"\n"
        count = max(1, min(MAX_PROCESSES, usable_cores() // 2))
        self._idle: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()
        for _ in range(count):
            self._idle.put_nowait(None)
        self._processes: set[asyncio.subprocess.Process] = set()
        self._is_closed = False

    async def warm_up(self) -> None:
        """Start a process now, so that the first adapter need not wait for it."""
        process = await self._idle.get()
        try:
            process = process or await self._start()
        except (EOFError, OSError):
            logger.warning("packing process did not start", exc_info=not self._is_closed)
        finally:
            self._idle.put_nowait(process)

    async def prepare(self, folder: Path, sha256: str) -> int:
        """The pages of the folder's verified image; 0 = the engine has to make it.

        Raises:
            DataLoss: the files are damaged.
            InvalidAdapter: not for this base, or over the rank limit.
            Unavailable: no process could do it.
        """
        process = await self._idle.get()
        try:
            if self._is_closed:
                raise EOFError
            if process is None or process.returncode is not None:
                process = await self._start()
            async with asyncio.timeout(TIMEOUT_S):
                job = msgspec.json.encode(PackJob(str(folder), sha256))
                answer = msgspec.json.decode(await ask_line(process, job), type=Prepared)
        except (TimeoutError, EOFError, OSError) as failure:
            self._end(process)
            raise Unavailable("the adapter could not be packed", reason="PACK_FAILED") from failure
        except BaseException:
            self._end(process)  # its answer may still arrive and must not be taken for another
            raise
        finally:
            self._idle.put_nowait(process if process in self._processes else None)
        if answer.error is not None:
            raise answer.error.to_error()
        return answer.num_pages

    async def close(self) -> None:
        """End the processes; callers that wait for one get an error."""
        self._is_closed = True
        processes = list(self._processes)
        for process in processes:
            self._end(process)
        await asyncio.gather(*(process.communicate() for process in processes))

    async def _start(self) -> asyncio.subprocess.Process:
        process = await start_module(
            "loraplex_services.worker.adapters.pack.pack_process",
            max_line_bytes=MAX_LINE_BYTES,
            shows_errors=True,
            nice=0,  # a request waits for the result while the steps of others may use all cores
        )
        self._processes.add(process)
        if self._is_closed:  # in the meantime
            self._end(process)
            raise EOFError
        assert process.stdin is not None
        process.stdin.write(self._setup)
        return process

    def _end(self, process: asyncio.subprocess.Process | None) -> None:
        if process is not None:
            self._processes.discard(process)
            if process.returncode is None:
                process.kill()
