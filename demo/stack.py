"""Starts and stops `loraplex up` for the demo, as a user would from a shell."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY = re.compile(r"loraplex ready (http://\S+) grpc (\S+) registry (\S+)")
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
NUM_LOG_LINES = 30


@dataclass(frozen=True, slots=True)
class Stack:
    """Addresses of a running stack."""

    http: str
    grpc: str
    registry: str


class StackFailed(Exception):
    """The stack did not start or did not stop in order."""


@contextmanager
def running_stack(
    model: Path, model_name: str, state_dir: Path, settings: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """A stack on free ports with its own state; stopped with SIGTERM at the end.

    Args:
        settings: `LORAPLEX_*` variables. Of this process's own, only LORAPLEX_CPU_ISA counts.

    Raises:
        StackFailed: with the last lines of its log.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    log = state_dir / "up.log"
    command = [
        *(sys.executable, "-m", "loraplex.cli.loraplex", "up"),
        *("--model", str(model), "--served-model-name", model_name),
        *("--state-dir", str(state_dir)),
        *("--http-port", "0", "--grpc-port", "0", "--registry-port", "0"),
    ]
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LORAPLEX_") or name == "LORAPLEX_CPU_ISA"
    }
    environ.update(settings or {})
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log_file, text=True, env=environ
        )
    try:
        yield _wait_ready(process, log)
    finally:
        code = _stop(process)
    if code != 0:
        raise StackFailed(f"the stack stopped with exit code {code}\n{_tail(log)}")


def _wait_ready(process: subprocess.Popen[str], log: Path) -> Stack:
    """Read stdout on a thread, so that a silent start ends with an error."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None, "opened with a pipe"
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        while line := lines.get(timeout=START_TIMEOUT_S):
            match = READY.fullmatch(line.strip())
            if match:
                return Stack(*match.groups())
    except queue.Empty:
        raise StackFailed(f"not ready after {START_TIMEOUT_S:.0f} s\n{_tail(log)}") from None
    raise StackFailed(f"the stack ended before it was ready\n{_tail(log)}")


def _stop(process: subprocess.Popen[str]) -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([*lines[-NUM_LOG_LINES:], f"(whole log: {log})"])
