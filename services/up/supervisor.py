"""Starts the children, reports when all of them answer, and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from loraplex.errors import LoraplexError
from loraplex_services.common.grpc.health_check import is_serving
from loraplex_services.up.child import Child
from loraplex_services.up.wiring import ChildSpec

logger = logging.getLogger(__name__)

POLL_S = 0.1
LOG_EVERY_S = 15.0
_KNOWN_EXITS = range(2, 8)
"""Exit codes of docs/reference/commands.md; a signal or a traceback says nothing more than 1."""
KILL_MARGIN_S = 5.0
"""Time in addition to the drain time in which a child closes its files."""
SAME_SIGNAL_S = 0.2
"""Signals that follow the first one within this time are the same one: `timeout` and some process
managers signal a process and its group."""


class ChildFailed(LoraplexError):
    """A child ended before the stack was ready, and another start would fail in the same way."""

    reason = "CHILD_FAILED"

    def __init__(self, name: str, exit_code: int, why: str) -> None:
        """`why` is the child's error message; "" = it wrote only to its log."""
        super().__init__(
            why
            or f"{name} ended with exit code {exit_code} before it was ready; see its last lines "
            "above"
        )
        self.exit_code = exit_code if exit_code in _KNOWN_EXITS else 1
        """The exit code of `up`."""


class Supervisor:
    """Runs the children of one stack."""

    def __init__(self, specs: Sequence[ChildSpec], drain_s: float, ready_line: str) -> None:
        """`specs` in the order in which they drain; `ready_line` is printed once."""
        self._children = [Child(spec) for spec in specs]
        self._drain_s = drain_s
        self._ready_line = ready_line
        self._signal: signal.Signals | None = None
        self._signalled_s = 0.0
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Run until a signal or a child that cannot start. Returns the exit code.

        Raises:
            ChildFailed: a child cannot be started.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        running = [asyncio.create_task(child.keep_running()) for child in self._children]
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
            for child, task in zip(self._children, running, strict=True):
                if task.done() and self._signal is None:
                    raise ChildFailed(child.spec.name, task.result(), child.last_error)
        finally:
            announcing.cancel()
            await self._drain()
            await asyncio.gather(*running, announcing, stopping, return_exceptions=True)
        return 128 + signal.SIGINT if self._signal == signal.SIGINT else 0

    async def _announce(self) -> None:
        await asyncio.gather(*(_wait_ready(child) for child in self._children))
        print(self._ready_line, flush=True)
        if sys.stderr.isatty():
            url = self._ready_line.split()[2]
            print(f"console {url}/   next: registry upload DIR --name NAME", file=sys.stderr)

    async def _drain(self) -> None:
        """Gateways first, so that workers can finish what they were given; the registry last."""
        self._stopping.set()
        for child in self._children:
            await child.stop(self._drain_s + KILL_MARGIN_S)

    def _on_signal(self, number: signal.Signals) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._signal is None:
            self._signal = number
            self._signalled_s = now_s
            self._stopping.set()
        if now_s - self._signalled_s < SAME_SIGNAL_S:
            return
        for child in self._children:
            child.kill()
        os._exit(128 + number)


async def _wait_ready(child: Child) -> None:
    """Return once the child is ready. Mutates `child.was_ready`."""
    clock = asyncio.get_running_loop().time
    started_s = logged_s = clock()
    while not await is_serving(child.spec.health):
        if clock() - logged_s > LOG_EVERY_S:
            logged_s = clock()
            waited_s = round(logged_s - started_s)
            logger.warning("still waiting", extra={"child": child.spec.name, "waited_s": waited_s})
        await asyncio.sleep(POLL_S)
    child.was_ready = True
