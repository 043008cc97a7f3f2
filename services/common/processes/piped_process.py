"""Child processes that answer over pipes, for work on untrusted bytes.

They get no credentials, and only the environment variables that Python needs. They end when stdin
closes. Most have a lower priority than the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

_KEPT = ("PATH", "TZ", "LANG")
DEFAULT_MAX_LINE_BYTES = 1 << 16
NICE = 5
"""On a busy core the server gets three times as much time as one of these processes."""


async def start_module(
    module: str,
    *,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    shows_errors: bool = False,
    nice: int = NICE,
) -> asyncio.subprocess.Process:
    """Run `python -m module` with pipes as stdin and stdout.

    Args:
        module: full name of the module.
        max_line_bytes: longest line of an answer.
        shows_errors: whether its stderr is this process's; otherwise it is discarded.
        nice: what is added to this process's.
    """
    environ = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if shows_errors else asyncio.subprocess.DEVNULL,
        limit=max_line_bytes,
        env=environ,
    )
    with contextlib.suppress(OSError):  # it has ended, or may not get a lower priority
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    return process


async def ask_line(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    """Send one line and await the one that answers it.

    Raises:
        EOFError: the process died, as OSError may say too.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + b"\n")
    await process.stdin.drain()
    answer = await process.stdout.readline()
    if not answer.endswith(b"\n"):
        raise EOFError
    return answer
