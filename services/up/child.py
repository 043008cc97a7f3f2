"""One child process, which is restarted whenever it ends, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

from loraplex_services.common.processes.process import MAX_ERROR_BYTES
from loraplex_services.common.processes.tied import tied_to_parent
from loraplex_services.up.wiring import ChildSpec

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
STEADY_S = 30.0
"""A child that ran at least this long is restarted without a longer pause than before."""
FINAL_EXITS = (2, 3, 4, 5, 7)
"""Exit codes after which the next start would fail in the same way: something is refused, taken,
forbidden or missing."""
MAX_FAILED_STARTS = 3
"""Number of failed starts of a child that was never ready, after which it is not started again."""


class Child:
    """Keeps one child running in a process group of its own."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.was_ready = False
        """Set once it has been ready: from then on it is restarted until `stop`."""
        self.last_error = ""
        """The error message with which the last process ended; "" = it wrote none."""
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    async def keep_running(self) -> int:
        """Run until stopped. Returns the exit code of the last process.

        Returns early if another start makes no sense: after a usage error or a conflict, or if the
        child failed to start several times and was never ready.
        """
        pause_s = FIRST_PAUSE_S
        failed_starts = 0
        while True:
            started_s = asyncio.get_running_loop().time()
            code = await self._run_once()
            if self._stopping:
                return code
            if not self.was_ready:
                failed_starts += 1
                if code in FINAL_EXITS or failed_starts >= MAX_FAILED_STARTS:
                    return code
            if asyncio.get_running_loop().time() - started_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            logger.warning(
                "child ended; restarting it",
                extra={
                    "child": self.spec.name,
                    "exit_code": code,
                    "reason": self.last_error,
                    "pause_s": pause_s,
                },
            )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            if self._stopping:
                return code

    async def _run_once(self) -> int:
        """Run one process to its end. Mutates `last_error`. Returns the exit code."""
        errors, error_fd = os.pipe()
        os.set_blocking(errors, False)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *tied_to_parent(
                    sys.executable, "-m", self.spec.module, "--error-fd", str(error_fd)
                ),
                env=self.spec.environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=[error_fd],
                process_group=0,
            )
            logger.info("child started", extra={"child": self.spec.name, "pid": self._process.pid})
            code = await self._process.wait()
            self.last_error = _read_now(errors)
            return code
        finally:
            os.close(errors)
            os.close(error_fd)

    async def stop(self, grace_s: float) -> None:
        """Ask the process to drain; kill its group if it takes longer than `grace_s`."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            logger.warning("child did not drain in time", extra={"child": self.spec.name})
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Kill the whole process group."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, because it drains its own children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _read_now(pipe: int) -> str:
    """The text in a pipe; "" if there is none."""
    try:
        return os.read(pipe, MAX_ERROR_BYTES).decode(errors="replace").strip()
    except BlockingIOError:
        return ""
