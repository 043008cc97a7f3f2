"""SIGUSR2 makes a process print where it is: every thread, then every task and what it awaits.

Names of files and functions only: no values, so nothing that a client sent.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import signal
import sys
from types import FrameType
from typing import Any, TextIO

_FRAMES = ("cr_frame", "ag_frame", "gi_frame")
_AWAITS = ("cr_await", "ag_await", "gi_yieldfrom")
_DEEPEST = 64
_STDERR = 2


def print_stacks_on_signal() -> None:
    """From now on SIGUSR2 prints to stderr. Threads also where Python itself hangs; tasks of the
    running event loop, if there is one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        has_loop = False
    else:
        has_loop = True
        loop.add_signal_handler(signal.SIGUSR2, lambda: print_tasks(sys.stderr))
    faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True, chain=has_loop)


def print_tasks(to: TextIO) -> None:
    """One line a task: the functions that it is in, outermost first."""
    for task in asyncio.all_tasks():
        print(f"task {task.get_name()}: {' > '.join(_places(task.get_coro()))}", file=to)
    to.flush()


def _places(awaited: Any) -> list[str]:
    """Where a coroutine is, and what it awaits, and so on."""
    places: list[str] = []
    while awaited is not None and len(places) < _DEEPEST:
        frame: FrameType | None = _first(awaited, _FRAMES)
        if frame is None:
            inner = _inside(awaited)
            if inner is None:
                return [*places, type(awaited).__name__]
            awaited = inner
            continue
        code = frame.f_code
        places.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        awaited = _first(awaited, _AWAITS)
    return places


def _first(thing: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(thing, name, None))), None)


def _inside(awaited: Any) -> Any:
    """The generator behind one step of an asynchronous iteration, which no attribute leads to."""
    if not type(awaited).__name__.startswith(("async_generator_", "coroutine_wrapper")):
        return None
    return next((r for r in gc.get_referents(awaited) if _first(r, _FRAMES) is not None), None)
