"""`loraplex chat` in a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from loraplex.cli.generate import _shown
from loraplex.client.generation import CompletionChunk
from tests.cli.conftest import REPO, Command, environment

NOBODY = "127.0.0.1:9"
IN_A_TERMINAL = """
import os, pty, signal, sys
# Where the tests run in the background, interrupts are ignored, and a child would inherit that. A
# shell gives its children in a terminal the default.
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


@pytest.mark.parametrize(("key", "code"), [(b"\x03", 130), (b"\x04", 0)], ids=["ctrl-c", "ctrl-d"])
def test_one_key_ends_a_chat_at_its_prompt(key: bytes, code: int) -> None:
    chat = Command("loraplex.cli.loraplex").argv("chat", "anyone", "--gateway", NOBODY)
    with subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *chat],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        cwd=REPO,
    ) as terminal:
        assert terminal.stdin is not None and isinstance(terminal.stdout, io.BufferedReader)
        shown = b""
        while not shown.endswith(b"\n> "):
            shown += terminal.stdout.read1()
        terminal.stdin.write(key)
        terminal.stdin.flush()
        assert terminal.wait(60) == code


async def test_stdout_has_the_answer_and_stderr_the_reasoning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = [("", "Look "), ("", "it up."), ("Ra", ""), ("in.", "")]

    async def chunks() -> AsyncIterator[CompletionChunk]:
        for text, reasoning in parts:
            yield CompletionChunk("id", 0, text, (), reasoning)

    passed = [(chunk.text, chunk.reasoning) async for chunk in _shown(chunks(), streamed=True)]
    assert passed == parts
    assert capsys.readouterr() == ("Rain.\n", "Look it up.\n\n")
