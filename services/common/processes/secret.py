"""Starts a process that must know a secret, which its arguments and environment do not show."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence


def start_with_secret(command: Sequence[str], secret: str) -> subprocess.Popen[bytes]:
    """Start `command`, and write `secret` to its standard input."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which its exit status says
        process.stdin.write(secret.encode())
        process.stdin.close()
    return process


def read_secret() -> str:
    """Read the secret that `start_with_secret` wrote."""
    return sys.stdin.read()
