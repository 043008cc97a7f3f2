"""The child's side of a `ProcessPool`: answers jobs from stdin until stdin closes.

Frames both ways are a 4-byte big-endian length and that many bytes. The first frame is the setup
that all jobs share; its answer says that the process is ready.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
import sys
from collections.abc import Callable

FRAME = struct.Struct(">I")
MAX_FRAME_BYTES = 256 << 20


def limit_memory(max_bytes: int) -> None:
    """Bound the address space, and with it the memory, of this process."""
    for limit, value in ((resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit on the address space
            resource.setrlimit(limit, (value, value))


def read_setup() -> bytes:
    """The first frame."""
    return _read()


def serve(answer: Callable[[bytes], bytes], cpu_s: float = 0.0) -> None:
    """Report that the process is ready, then answer every job.

    Args:
        cpu_s: a job that takes more processor time ends this process by SIGPROF; 0 = no limit.
    """
    _write(b"")
    while True:
        job = _read()
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        result = answer(job)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(result)


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
