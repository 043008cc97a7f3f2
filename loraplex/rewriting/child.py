"""Runs a part of a conversion as a process of its own, which may refuse the adapter."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from loraplex.errors import InvalidAdapter, LoraplexError, Violation

REFUSED = 3


def run(
    module: str, arguments: Sequence[str], environ: Mapping[str, str], does: str, **options: Any
) -> bytes:
    """Run a module of this package, and return what it writes to stdout.

    Args:
        environ: variables of the process, besides PYTHONPATH.
        does: what the process does, for an error.
        options: of `subprocess.run`.

    Raises:
        InvalidAdapter: the process refused the adapter.
        LoraplexError: it ended without an answer.
        TimeoutExpired: it took longer than the timeout in `options`.
    """
    path = os.pathsep.join(filter(None, sys.path))
    argv = [sys.executable, "-P", "-m", f"{__package__}.{module}", *arguments]
    variables = {**environ, "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    done: Any = subprocess.run(argv, env=variables, check=False, **pipes)
    if done.returncode == REFUSED:
        raise InvalidAdapter.of([Violation(**json.loads(done.stderr.splitlines()[-1]))])
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise LoraplexError(f"the process that {does} ended: {last}")
    written: bytes = done.stdout
    return written


def refuse(field: str, value: object, description: str) -> NoReturn:
    """End this process, one that `run` started, because of a field of the adapter."""
    violation = {"field": field, "value": str(value), "description": description}
    sys.stderr.write("\n" + json.dumps(violation))
    sys.stderr.flush()
    sys.exit(REFUSED)


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate at most `num_bytes` of new memory, where the system can do so."""
    most = _data_bytes() + num_bytes
    with contextlib.suppress(ValueError, OSError):  # macOS lacks this limit.
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _data_bytes() -> int:
    """Bytes that count towards RLIMIT_DATA now; 0 if the system does not say."""
    try:
        with open("/proc/self/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return int(lines["VmData"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
