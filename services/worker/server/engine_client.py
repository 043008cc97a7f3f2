"""Starts the engine process, exchanges frames with it, and notices when it dies or hangs.

The first engine process starts before the rest of the worker is loaded, since to import torch takes
longer than all else. It waits for its configuration.

Every start is a new epoch. A dead engine is replaced after a pause that grows with each consecutive
failure. The worker ends if the engine refuses its model, because a restart would not help, or if
MAX_FAILED_STARTS engines end before one is ready.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from loraplex.errors import InvalidRequest, LoraplexError, Unavailable, Unsupported
from loraplex_services.common.settings import variables
from loraplex_services.worker.types.messages import (
    Command,
    EngineConfig,
    EngineMessage,
    EngineReady,
    Entered,
    FrameBuffer,
    Ping,
    PrefetchCopied,
    StepInput,
    StepOutput,
    decode_message,
    frame,
)

if TYPE_CHECKING:  # it imports this module
    from loraplex_services.worker.server.api_server import ApiServer

logger = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES = 4 << 20
RECEIVE_BYTES = 1 << 20
PING_INTERVAL_S = 1.0
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
HANG_UP_S = 2.0
"""Seconds that an engine may take to notice that the API server process has ended."""
BLAMELESS = (0, -signal.SIGKILL)
"""Exit codes of engines that were ended from outside, for which no request is to blame."""
MAX_FAILED_STARTS = 3
"""Number of engines that may end before one becomes ready."""
STABLE_S = 30.0
"""Seconds that an engine must have lived for to reset the count of failures."""


class EngineClient:
    """Keeps one engine process running."""

    def __init__(self, *, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._listener: ApiServer
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._outbox: list[Command] = []
        self._heard_s = 0.0
        self.is_up = False
        """True while commands can be sent."""
        self._is_hung = False

    def state(self) -> dict[str, Any]:
        """The state of the engine process, for /debug/state."""
        heard = self._heard_s and round(time.monotonic() - self._heard_s, 3)
        return {
            "is_up": self.is_up,
            "process_id": self._process and self._process.pid,
            "silence_s": heard,
            "step_timeout_s": self._step_timeout_s,
        }

    def send(self, *commands: Command) -> None:
        """Queue commands; those of one iteration of the event loop are sent together.

        Raises:
            Unavailable: the engine is not up.
        """
        if not self.is_up:
            raise Unavailable("the engine is starting", reason="ENGINE_DOWN", retry_after_s=1.0)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox += commands

    async def start(self) -> None:
        """Start an engine process, which imports torch and waits for `run`."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "loraplex_services.worker.engine.process",
                "--fd",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        logger.info("engine started", extra={"process_id": self._process.pid})

    async def stop(self) -> None:
        """End an engine process that `run` has not got to."""
        await self._reap(was_up=False)

    async def run(self, config: EngineConfig, listener: ApiServer) -> None:
        """Keep an engine running until cancelled. `listener` is told on the event loop what it
        reports.

        Raises:
            LoraplexError: the engine refused the model or its configuration, or no engine became
                ready in MAX_FAILED_STARTS starts.
        """
        self._listener = listener
        pause_s = FIRST_PAUSE_S
        num_failed_starts = 0
        was_ever_up = False
        while True:
            begin_s = time.monotonic()
            try:
                await self._live_once(config)
            finally:
                was_up, self.is_up = self.is_up, False
                if was_up:
                    self._listener.engine_down(_engine_lost())
                code = await self._reap(was_up)
                if was_up and (self._is_hung or code not in BLAMELESS):
                    self._listener.engine_crashed()
            was_ever_up = was_ever_up or was_up
            num_failed_starts += not was_ever_up
            if num_failed_starts >= MAX_FAILED_STARTS:
                raise _engine_cannot_start(code)
            if time.monotonic() - begin_s >= STABLE_S:
                pause_s = FIRST_PAUSE_S
            logger.warning("engine restarts", extra={"pause_s": pause_s})
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _live_once(self, config: EngineConfig) -> None:
        """Run one engine to its end. Raises LoraplexError only if the engine refused."""
        self._is_hung = False
        if self._writer is None:
            await self.start()
        assert self._writer is not None
        self._writer.write(frame(config))
        watchdog = asyncio.create_task(self._watch())
        try:
            await self._read()
        except OSError:
            logger.debug("engine socket broke", exc_info=True)
        finally:
            watchdog.cancel()
            self._outbox.clear()

    async def _read(self) -> None:
        frames = FrameBuffer()
        while data := await self._reader.read(RECEIVE_BYTES):
            self._heard_s = time.monotonic()
            for body in frames.feed(data):
                self._on_message(decode_message.decode(body))

    def _on_message(self, message: EngineMessage) -> None:
        if isinstance(message, StepOutput):
            self._listener.engine_output(message)
        elif isinstance(message, Entered):
            self._listener.engine_entered(message.request_ids)
        elif isinstance(message, PrefetchCopied):
            self._listener.prefetch_copied(message.digest, message.device_bytes)
        elif isinstance(message, EngineReady):
            self.is_up = True
            self._listener.engine_up(message, time.time_ns() // 1_000_000)
        else:
            raise _by_setting(message.error.to_error())

    async def _watch(self) -> None:
        """Ask for signs of life once the engine is up; kill it when none comes.

        A second in which nothing was heard counts as one, however long it took: while this process
        was stopped, as a paused container is, the engine was stopped as well.
        """
        assert self._process is not None
        silence_s = 0.0
        while True:
            last_s = self._heard_s
            await asyncio.sleep(PING_INTERVAL_S)
            if not self.is_up or self._heard_s != last_s:
                silence_s = 0.0
                continue
            silence_s += PING_INTERVAL_S
            if silence_s > self._step_timeout_s:
                self._is_hung = True
                logger.error("engine hangs", extra={"silence_s": round(silence_s, 1)})
                self._process.kill()
                return
            self.send(Ping())

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if self.is_up and self._writer is not None:
            self._writer.write(frame(StepInput(commands)))

    async def _reap(self, was_up: bool) -> int:
        """Close the socket, end the process if it still runs, and wait for it. Returns its exit
        code. An engine that is still loading does not read its socket, so it is killed at once."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is None:
            return 0
        if not was_up and self._process.returncode is None:
            self._process.kill()
        code = await _end(self._process)
        logger.info("engine ended", extra={"process_id": self._process.pid, "exit_code": code})
        self._process = None
        return code


async def _end(process: asyncio.subprocess.Process) -> int:
    """Wait briefly for a process whose socket was closed, then kill it. Returns its exit code."""
    try:
        return await asyncio.wait_for(process.wait(), HANG_UP_S)
    except TimeoutError:
        process.kill()
        return await process.wait()


def _engine_cannot_start(code: int) -> Unavailable:
    return Unavailable(
        f"the engine process ended {MAX_FAILED_STARTS} times before it was ready, the last time "
        f"with exit code {code}; its log above gives the reason",
        reason="ENGINE_DOWN",
    )


def _engine_lost() -> Unavailable:
    return Unavailable("the engine was lost", reason="ENGINE_LOST", retry_after_s=1.0)


def _by_setting(error: LoraplexError) -> LoraplexError:
    """An error of the engine, which names fields, under the name of the setting that users know."""
    if isinstance(error, InvalidRequest | Unsupported):
        for violation in error.violations:
            name = f"LORAPLEX_{violation.field.upper()}"
            if name in variables.known_names():
                return type(error).field(name, violation.value, violation.description)
    return error
