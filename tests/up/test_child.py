"""Children restart, stop on request, are given up after failures, and die with their parent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loraplex_services.up import child as child_module
from loraplex_services.up.child import FINAL_EXITS, MAX_FAILED_STARTS, Child
from loraplex_services.up.wiring import ChildSpec

REPO = Path(__file__).parents[2]
LOGS_AND_DIES = (
    "import os, pathlib, sys\npathlib.Path('ran').open('a').write('x')\nsys.exit({code})"
)
WAITS = (
    "import pathlib, time, os\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
)
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "FIRST_PAUSE_S", 0.01)


def _child(folder: Path, code: str) -> Child:
    (folder / "work.py").write_text(f"import os\nos.chdir({str(folder)!r})\n{code}")
    environ = {**os.environ, "PYTHONPATH": f"{REPO}:{folder}"}
    return Child(ChildSpec("work", "work", environ, "unused"))


async def _pid(folder: Path) -> int:
    """The pid that a waiting child wrote."""
    path = folder / "pid"
    while not (path.exists() and path.read_text()):
        await asyncio.sleep(0.02)
    pid = int(path.read_text())
    path.unlink()
    return pid


async def test_gives_up_after_failed_starts(tmp_path: Path) -> None:
    child = _child(tmp_path, LOGS_AND_DIES.format(code=1))
    assert await child.keep_running() == 1
    assert len((tmp_path / "ran").read_text()) == MAX_FAILED_STARTS


@pytest.mark.parametrize("code", FINAL_EXITS)
async def test_a_start_that_can_never_succeed_is_not_tried_again(tmp_path: Path, code: int) -> None:
    child = _child(tmp_path, LOGS_AND_DIES.format(code=code))
    assert await child.keep_running() == code
    assert (tmp_path / "ran").read_text() == "x"


async def test_what_a_child_says_of_its_end_is_kept(tmp_path: Path) -> None:
    says = "import os, sys\nos.write(int(sys.argv[-1]), b'no such base')\nsys.exit(2)"
    child = _child(tmp_path, says)
    assert await child.keep_running() == 2
    assert child.last_error == "no such base"


async def test_a_child_that_says_nothing_has_no_last_words(tmp_path: Path) -> None:
    child = _child(tmp_path, "import sys\nsys.exit(2)")
    assert await child.keep_running() == 2
    assert child.last_error == ""


async def test_killed_child_starts_again_once_it_was_ready(tmp_path: Path) -> None:
    child = _child(tmp_path, WAITS)
    child.was_ready = True
    running = asyncio.create_task(child.keep_running())
    for _ in range(MAX_FAILED_STARTS + 1):
        os.kill(await _pid(tmp_path), 9)
    last = await _pid(tmp_path)
    await child.stop(10)
    await running
    assert not psutil.pid_exists(last)


async def test_child_that_ignores_the_drain_is_killed(tmp_path: Path) -> None:
    child = _child(tmp_path, STUBBORN)
    running = asyncio.create_task(child.keep_running())
    pid = await _pid(tmp_path)
    await child.stop(0.1)
    assert await running == -9
    assert not psutil.pid_exists(pid)


async def test_child_has_a_process_group_of_its_own(tmp_path: Path) -> None:
    child = _child(tmp_path, WAITS)
    running = asyncio.create_task(child.keep_running())
    pid = await _pid(tmp_path)
    assert os.getpgid(pid) == pid != os.getpgid(0)
    assert psutil.Process(pid).cmdline()[-4:-1] == ["-m", "work", "--error-fd"]
    await child.stop(10)
    await running


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux only")
async def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{STUBBORN}")
    parent = (
        "import subprocess, sys\n"
        "from loraplex_services.common.processes.tied import tied_to_parent\n"
        "command = tied_to_parent(sys.executable, '-m', 'work')\n"
        "subprocess.Popen(command, process_group=0).wait()"
    )
    environ = {**os.environ, "PYTHONPATH": f"{REPO}:{tmp_path}"}
    process = subprocess.Popen([sys.executable, "-c", parent], env=environ)
    pid = await _pid(tmp_path)
    process.kill()
    process.wait()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.02)
