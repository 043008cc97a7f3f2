"""Finds the processes of a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def processes_running(pid: int, module: str) -> Iterator[psutil.Process]:
    """The descendants of a process that run `python -m MODULE`.

    A child that was killed a moment ago may still be listed as a zombie, which has no command
    line; it is left out.
    """
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                yield child
