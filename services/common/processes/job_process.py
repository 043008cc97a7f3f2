"""The child's side of a `ProcessPool`: answers jobs from stdin until stdin closes.

Frames both ways are a 4-byte big-endian length and that many bytes. The first frame is the setup
that all jobs share; its answer says that the process is ready.

Each job runs in a thread of its own, which exists before the job arrives. The server may lower its
priority for good (`piped_process.lower_priority`), and the next job has the usual priority again.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

FRAME = struct.Struct(">I")
MAX_FRAME_BYTES = 256 << 20
_M_ARENA_MAX = -8
"""glibc's number of the option."""


def limit_memory(max_bytes: int) -> None:
    """Bound the address space, and with it the memory, of this process."""
    for limit, value in ((resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit on the address space
            resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":  # a heap for each thread would take 64 MiB of the address space
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def read_setup() -> bytes:
    """The first frame."""
    return _read()


def serve(answer: Callable[[bytes], bytes], cpu_s: float = 0.0) -> None:
    """Report that the process is ready, then answer every job.

    Args:
        cpu_s: a job that takes more processor time ends this process by SIGPROF; 0 = no limit.
    """
    thread = _started_thread()
    _write(b"")
    while True:
        job = _read()
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        result = thread.submit(answer, job).result()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        thread.shutdown()
        thread = _started_thread()
        _write(result)


def _started_thread() -> ThreadPoolExecutor:
    thread = ThreadPoolExecutor(1)
    thread.submit(bool).result()
    return thread


def _read() -> bytes:
    head = _exactly(FRAME.size)
    (length,) = FRAME.unpack(head)
    return _exactly(length)


def _exactly(num_bytes: int) -> bytes:
    data = sys.stdin.buffer.read(num_bytes)
    if len(data) < num_bytes:
        sys.exit(0)
    return data


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(FRAME.pack(len(data)) + data)
    sys.stdout.buffer.flush()
