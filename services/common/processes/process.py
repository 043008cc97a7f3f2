"""The entry point that every service shares: `--help`, logging, settings, exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import textwrap
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from loraplex.errors import InvalidRequest, LoraplexError, codes_of
from loraplex_services.common.processes.stacks import print_stacks_on_signal
from loraplex_services.common.settings import switches, variables
from loraplex_services.common.telemetry.log import setup_logging

USAGE_STATUS = 2
MAX_OPEN_FILES = 65_536
MAX_ERROR_BYTES = 4096
"""Largest error that is written into a pipe; pipes of every system hold that much."""
THREAD_SWITCH_S = 0.0005
"""How long an event loop waits for a thread that computes in Python, each time. With Python's 5 ms,
a request that wakes the loop ten times would be 50 ms late while the answer of another is
formatted in a thread."""


def begin_child(name: str) -> None:
    """Set up a process of a service, which logs as `name`. Signals to end are for the service; on
    Linux, this process is killed when its parent ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    print_stacks_on_signal()
    setup_logging(name, switches.LOG_LEVEL.read(os.environ), switches.LOG_FORMAT.read(os.environ))
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def freeze_heap() -> None:
    """Exclude the objects that exist now from garbage collection. Call it once a service has
    started.

    Visiting all modules and tables would stop the event loop for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


def raise_file_limit() -> None:
    """Allow this process and its children as many open files as the system lets them have.

    Shells start with 256 (macOS) or 1,024, and every connection is one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has another limit above this one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_service(
    service: str,
    serve: Callable[[], Coroutine[Any, Any, None]],
    argv: Sequence[str] | None = None,
    *,
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run one service until its coroutine ends.

    Args:
        service: "registry", "gateway" or "worker".
        serve: called once logging is set up; may raise InvalidRequest for a bad setting.
        argv: arguments; those of the process by default. A service takes none but `--help` and,
            from `loraplex up`, `--error-fd N`: where to write why it ends, instead of on stderr.
        new_loop: makes the event loop; asyncio's own by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m loraplex_services.{service}",
        description=f"Run one {service} in the foreground. Everything is set by environment "
        "variables; `loraplex up` starts a whole stack on one machine.",
        epilog=_variables(service),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--error-fd", type=int, help=argparse.SUPPRESS)
    error_fd = parser.parse_args(argv).error_fd
    try:
        setup_logging(
            service, switches.LOG_LEVEL.read(os.environ), switches.LOG_FORMAT.read(os.environ)
        )
        variables.check_switches(os.environ)
        for warning in variables.unknown_variables(os.environ):
            logging.getLogger(f"loraplex_services.{service}").warning(warning)
        raise_file_limit()
        sys.setswitchinterval(THREAD_SWITCH_S)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_serve(serve))
    except LoraplexError as error:
        if error_fd is None:
            print(f"{service}: {error.message}", file=sys.stderr)
        else:
            os.write(error_fd, error.message.encode()[:MAX_ERROR_BYTES])
        return USAGE_STATUS if isinstance(error, InvalidRequest) else codes_of(error).exit
    return 0


async def _serve(serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    print_stacks_on_signal()
    await serve()


def _variables(service: str) -> str:
    """The variables that the service reads, each with its default and meaning."""
    lines = ["variables:"]
    for setting in variables.read_by(service):
        default = variables.shown(setting.default)
        lines.append(f"  {setting.name}" + (f" [{default}]" if default else ""))
        lines += textwrap.wrap(setting.doc, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
