"""The engine process: `python -m loraplex_services.worker.engine.process --fd N`.

It owns the model and the device. Between steps it reads whatever has come through the socket, and
it sleeps on the socket if there is nothing to do. It ends when the API server process closes its
end, never on a signal meant for that process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from loraplex.errors import InvalidRequest, LoraplexError
from loraplex_services.common.processes.process import begin_child
from loraplex_services.common.settings.switches import STEP_TRACE
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.engine.step_trace import TracedRunner
from loraplex_services.worker.runner.parallel.messages import RankLost
from loraplex_services.worker.types.messages import (
    Command,
    EngineConfig,
    EngineMessage,
    EngineRefused,
    Entered,
    FrameBuffer,
    PrefetchCopied,
    WireError,
    decode_config,
    decode_input,
    frame,
)

logger = logging.getLogger("loraplex_services.worker.engine.process")

RECEIVE_BYTES = 1 << 20
RANK_END_S = 2.0
"""Seconds after a failed collective within which the end of another rank may be noticed."""
QUIET_S = 0.5
"""Seconds without work after which the engine checks its integrity, once."""
GRAMMAR_WAIT_S = 0.002
"""Seconds of sleep while the only requests that could continue wait for a grammar's thread."""
STALLED_WAIT_S = 0.1
"""Seconds of sleep while every request waits for something; bounds how late a deadline is
noticed."""


class ServerGone(Exception):
    """The API server process closed its end."""


class ServerSocket:
    """The engine's end of the socket pair; blocking. Threads of the engine may interrupt a wait."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = FrameBuffer()
        self._sending = threading.Lock()
        self._wake_reader, self._wake_writer = socket.socketpair()
        for side in (self._wake_reader, self._wake_writer):
            side.setblocking(False)

    def wake(self) -> None:
        """End the wait in `commands`, or the next one. From any thread."""
        with contextlib.suppress(BlockingIOError):  # full: a wake-up is under way
            self._wake_writer.send(b"!")

    def first(self) -> EngineConfig:
        """Wait for the configuration."""
        bodies: list[bytes] = []
        while not bodies:
            bodies = self._receive()
        assert len(bodies) == 1, "commands before the engine is ready"
        return decode_config(bodies[0])

    def commands(self, timeout_s: float | None) -> list[Command] | None:
        """Everything that has been received. Waits up to `timeout_s` (None = forever) for the first
        command or wake-up; returns None if neither came.

        Raises:
            ServerGone: the API server process closed its end.
        """
        commands: list[Command] | None = None
        while ready := select.select([self._socket, self._wake_reader], [], [], timeout_s)[0]:
            commands = commands or []
            if self._wake_reader in ready:
                self._wake_reader.recv(RECEIVE_BYTES)
            if self._socket in ready:
                for body in self._receive():
                    commands += decode_input(body).commands
            timeout_s = 0.0
        return commands

    def send(self, message: EngineMessage) -> None:
        """Write one frame. From any thread. Raises ServerGone."""
        try:
            with self._sending:
                self._socket.sendall(frame(message))
        except OSError as error:
            raise ServerGone from error

    def _receive(self) -> list[bytes]:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            raise ServerGone from error
        if not data:
            raise ServerGone
        return list(self._frames.feed(data))


def run(engine: Engine, server: ServerSocket) -> NoReturn:
    """Serve until the API server process closes its end, then raise ServerGone."""
    is_checked = True
    engine.adapter_loads.wake = server.wake

    def prefetched(digest: str, num_pages: int) -> None:
        with contextlib.suppress(ServerGone):  # this loop notices it as well
            server.send(PrefetchCopied(digest, num_pages * engine.page_bytes))

    engine.adapter_loads.prefetched = prefetched
    engine.announce = lambda request_ids: server.send(Entered(request_ids))
    while True:
        patience_s = _patience_s(engine, is_checked)
        commands = server.commands(patience_s)
        if commands is None and patience_s == QUIET_S:
            engine.check_integrity()
            is_checked = True
        output = engine.step(commands or [])
        has_news = bool(output.tokens or output.failures or output.residency)
        is_checked = is_checked and not has_news
        if commands or has_news:
            server.send(output)


def _patience_s(engine: Engine, is_checked: bool) -> float | None:
    if engine.may_advance:
        return 0.0
    if engine.awaits_grammars:
        return GRAMMAR_WAIT_S
    if engine.has_requests:
        return STALLED_WAIT_S
    return None if is_checked else QUIET_S


def build_engine(config: EngineConfig) -> Engine:
    """Load the model. Raises LoraplexError if it cannot be served with this configuration."""
    from loraplex_services.worker.runner.building import build_runner

    runner = build_runner(
        Path(config.model_dir),
        **config.runner_fields(),
        num_ranks=config.tensor_parallel,
        nodes=config.nodes,
        on_rank_end=_end_as_rank,
    )
    if (path := STEP_TRACE.read(os.environ)) is not None:
        return Engine(TracedRunner(runner, path), config, time.monotonic)
    return Engine(runner, config, time.monotonic)


def main() -> int:
    """Process entry. The exit code is 0 if the server has gone, 3 if the model was refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fd", type=int, required=True, help="inherited socket to the API server process"
    )
    server = ServerSocket(socket.socket(fileno=parser.parse_args().fd))
    begin_child("engine")
    gc.disable()  # until the model is loaded, which saves a seventh of the time of imports
    try:
        return _serve(server)
    except ServerGone:
        logger.info("the API server process has ended")
        return 0
    except RankLost as error:
        logger.error("the group of ranks is broken", extra={"reason": str(error)})
        time.sleep(RANK_END_S)  # the end of the rank itself determines the exit code
        return 1


def _may_pass(error: Exception) -> bool:
    """Whether a failure is not the base's fault, so that the next start may succeed."""
    if isinstance(error, RankLost | MemoryError | ImportError):
        return True
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _unexpected(error: Exception) -> InvalidRequest:
    """The message of an engine that ended with an unexpected error."""
    first_line = str(error).partition("\n")[0]
    why = (
        f"cannot be loaded ({type(error).__name__}: {first_line}); copy or download the base "
        "again, and if it is whole, report this with the log above"
    )
    return InvalidRequest.field("model", type(error).__name__, why)


def _end_as_rank(rank: int, code: int) -> None:
    """End this process as another rank has ended, so that the API server process can tell a crash
    from a kill. On any thread."""
    if code == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(max(1, code))


def _serve(server: ServerSocket) -> int:
    # The API server process loads its own modules meanwhile.
    importlib.import_module("loraplex_services.worker.runner.building")
    config = server.first()
    try:
        engine = build_engine(config)
    except LoraplexError as error:
        server.send(EngineRefused(WireError.of(error)))
        return 3
    except Exception as error:
        if _may_pass(error):
            raise
        logger.exception("the base cannot be loaded")
        server.send(EngineRefused(WireError.of(_unexpected(error))))
        return 3
    gc.collect()
    gc.freeze()  # the model stays, so collections between steps need not visit it
    gc.enable()
    server.send(engine.ready)
    run(engine, server)


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # tearing a large process down would only delay its successor
