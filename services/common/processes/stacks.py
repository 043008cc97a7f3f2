"""Shows what a process is doing: its threads and tasks now, or its threads over some seconds.

SIGUSR2 prints the former, and the server of `metrics.py` returns either. Both show only names of
files and functions and no values, so they contain nothing that a client sent.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import io
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from types import FrameType
from typing import Any, TextIO

_FRAMES = ("cr_frame", "ag_frame", "gi_frame")
_AWAITS = ("cr_await", "ag_await", "gi_yieldfrom")
_DEEPEST = 64
_STDERR = 2


def print_stacks_on_signal() -> None:
    """Print stacks to stderr on SIGUSR2. These are stacks of threads, even if Python hangs, and of
    the tasks of the running event loop, if there is one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        has_loop = False
    else:
        has_loop = True
        loop.add_signal_handler(signal.SIGUSR2, lambda: print_tasks(sys.stderr))
    faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True, chain=has_loop)


def all_stacks() -> str:
    """The stacks of all threads, then a line for each task of the running event loop."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = io.StringIO()
    for ident, frame in sys._current_frames().items():
        print(f"thread {names.get(ident, ident)}:", file=text)
        traceback.print_stack(frame, file=text)
    print_tasks(text)
    return text.getvalue()


def profile(seconds: float, interval_s: float = 0.01) -> str:
    """Where the threads of this process are, sampled for `seconds` by wall-clock time.

    One line for each stack seen, outermost function first, separated by semicolons, with the number
    of samples at its end: the "collapsed" form that flame graph viewers read. Blocks; the calling
    thread is left out.
    """
    seen: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                seen[";".join([str(names.get(ident, ident)), *_functions(frame)])] += 1
        time.sleep(interval_s)
    return "".join(f"{stack} {samples}\n" for stack, samples in seen.most_common())


def _functions(frame: FrameType | None) -> list[str]:
    """The functions that a thread is in, outermost first."""
    functions = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        functions.append(f"{module}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return functions[::-1]


def print_tasks(to: TextIO) -> None:
    """Print one line for each task: the functions that it is in, outermost first."""
    for task in asyncio.all_tasks():
        print(f"task {task.get_name()}: {' > '.join(_frames(task.get_coro()))}", file=to)
    to.flush()


def _frames(awaited: Any) -> list[str]:
    """Where a coroutine is, and what it awaits, and so on."""
    frames: list[str] = []
    while awaited is not None and len(frames) < _DEEPEST:
        frame: FrameType | None = _first(awaited, _FRAMES)
        if frame is None:
            inner = _inside(awaited)
            if inner is None:
                return [*frames, type(awaited).__name__]
            awaited = inner
            continue
        code = frame.f_code
        frames.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        awaited = _first(awaited, _AWAITS)
    return frames


def _first(thing: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(thing, name, None))), None)


def _inside(awaited: Any) -> Any:
    """The generator behind one step of an asynchronous iteration, which no attribute leads to."""
    if not type(awaited).__name__.startswith(("async_generator_", "coroutine_wrapper")):
        return None
    return next((r for r in gc.get_referents(awaited) if _first(r, _FRAMES) is not None), None)
