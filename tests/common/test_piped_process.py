"""Processes for the work on strangers' bytes start wherever the server was started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex_services.common.processes.piped_process import NICE, start_module


async def test_a_file_in_the_current_folder_is_not_taken_for_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "struct", "loraplex"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    process = await start_module("json.tool")
    answer, _ = await process.communicate(b"[1]")
    assert (process.returncode, answer.split()) == (0, [b"[", b"1", b"]"])


@pytest.mark.hostile
async def test_a_server_comes_before_the_processes_that_it_starts(tmp_path: Path) -> None:
    process = await start_module("json.tool")
    own, other = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (os.getpid(), process.pid))
    await process.communicate(b"[1]")
    assert other == min(19, own + NICE)
