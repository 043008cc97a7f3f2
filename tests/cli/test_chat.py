"""`loraplex chat` in a terminal."""

from __future__ import annotations

import os
import pty

import pytest

from tests.cli.conftest import Command, environment

NOBODY = "127.0.0.1:9"


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"\x04", 0)], ids=["ctrl-c", "ctrl-d"])
def test_one_key_ends_a_chat_at_its_prompt(key: bytes, code: int) -> None:
    argv = Command("loraplex.cli.loraplex").argv("chat", "anyone", "--gateway", NOBODY)
    process_id, terminal = pty.fork()
    if process_id == 0:
        os.execve(argv[0], argv, environment())
    shown = b""
    while not shown.endswith(b"\n> "):
        shown += os.read(terminal, 4096)
    os.write(terminal, key)
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == code
    os.close(terminal)
