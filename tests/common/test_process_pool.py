"""The pool of processes, with processes of a small module of this test."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.errors import Unavailable
from loraplex_services.common.limits import PoolLimits
from loraplex_services.common.processes import process_pool
from loraplex_services.common.processes.process_pool import JobFailed, ProcessPool

MODULE = """
import os, sys
from pathlib import Path
from loraplex_services.common.processes.job_process import read_setup, serve

with Path(read_setup().decode()).open("a") as started:
    print(os.getpid(), file=started)

def answer(job):
    if job == b"die":
        os._exit(1)
    if job.startswith(b"open "):  # a pipe, which waits for a reader
        open(job[5:], "wb").close()
    return str(os.getpid()).encode()

serve(answer, 0.0)
"""
LIMITS = PoolLimits("jobs", num_processes=2, memory_bytes=1 << 30, timeout_s=30.0)


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessPool]:
    (tmp_path / "jobs_of_this_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_pool, "SPARE_AFTER_S", 0.0)
    pool = ProcessPool("jobs_of_this_test", LIMITS, str(tmp_path / "started").encode())
    yield pool
    await pool.close()


async def test_where_a_job_costs_its_process_another_is_started_in_addition_to_the_idle_one(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "PAUSE_FACTOR", 0.0)
    idle = await asyncio.gather(pool.ask("a", b"pid"), pool.ask("b", b"pid"))
    with pytest.raises(JobFailed):
        await pool.ask("a", b"die")
    async with asyncio.timeout(20):
        while len((tmp_path / "started").read_text().splitlines()) < 3:
            await asyncio.sleep(0.01)
    later = await asyncio.gather(pool.ask("a", b"pid"), pool.ask("b", b"pid"))
    assert len(set(idle) & set(later)) == 1
    assert len((tmp_path / "started").read_text().splitlines()) == 3


@pytest.mark.hostile
async def test_during_a_long_job_another_process_is_started_before_a_tenant_needs_it(
    pool: ProcessPool, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    job = asyncio.create_task(pool.ask("a", b"open " + bytes(tmp_path / "pipe")))
    async with asyncio.timeout(20):
        while not pool.has_idle:
            await asyncio.sleep(0.01)
    started = (tmp_path / "started").read_text().split()
    other = await pool.ask("b", b"pid")
    with (tmp_path / "pipe").open("rb"):
        busy = await job
    assert sorted(started) == sorted([busy.decode(), other.decode()])


async def test_close_collects_a_process_that_became_ready_in_the_moment_in_which_it_was_killed(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "CLOSE_S", 600.0)
    exchange = process_pool._exchange
    closing: list[asyncio.Task[None]] = []

    async def close_after_ready(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
        answer = await exchange(process, frame)
        if frame != b"die":
            closing.append(asyncio.create_task(pool.close()))
            await asyncio.sleep(0)  # now it is killed
        return answer

    await pool.ask("a", b"pid")
    monkeypatch.setattr(process_pool, "_exchange", close_after_ready)
    with pytest.raises(JobFailed):
        await pool.ask("a", b"die")  # another is started
    async with asyncio.timeout(30):
        while not closing:
            await asyncio.sleep(0.01)
        await closing[0]


@pytest.mark.hostile
async def test_a_tenant_whose_job_cost_a_process_waits_before_its_next_one(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "PAUSE_FACTOR", 1e6)
    monkeypatch.setattr(process_pool, "MAX_PAUSE_S", 600.0)
    first = await pool.ask("a", b"pid")
    with pytest.raises(JobFailed):
        await pool.ask("a", b"die")
    waiting = asyncio.create_task(pool.ask("a", b"pid"))
    others = {await pool.ask("b", b"pid") for _ in range(20)}
    assert first not in others
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_job_is_refused_at_once_if_no_process_can_be_started(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(Unavailable, match="no process for jobs could be started"):
        await pool.ask("a", b"pid")
