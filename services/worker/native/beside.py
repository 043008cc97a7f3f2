"""Compile the kernels beside a worker that serves by torch meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

logger = logging.getLogger(__name__)

NICENESS = 10
"""More than the worker's own: a tenth of a core beside a busy engine, a core beside an idle one."""


async def compile_beside(isa: str) -> bool:
    """Build the library for `isa` at a low priority, with progress in the log. False = it failed.

    Cancelling ends the compiler, too.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.worker.native.build",
        "--isa",
        isa,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        process_group=0,  # not a session: Linux may share processors between those, whatever nice
    )
    assert process.stdout is not None
    try:
        with contextlib.suppress(OSError):  # it has ended, or the system allows no change
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
            os.setpriority(os.PRIO_PGRP, process.pid, niceness)
        async for line in process.stdout:
            logger.info(line.decode(errors="replace").rstrip())
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)  # lets it remove what it has begun
    if code:
        logger.warning("native kernels: none, torch goes on computing", extra={"exit_code": code})
    return not code
