"""The connection to one worker comes back whatever broke it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.request import WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex.errors import LoraplexError
from loraplex.v1 import worker_pb2
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.request import WorkerJob
from loraplex_services.gateway.workers import link, session
from loraplex_services.gateway.workers.link import WorkerLink
from loraplex_services.gateway.workers.session import WorkerLost
from tests.gateway.conftest import eventually
from tests.gateway.scripted_worker import ScriptedWorker, endless, start_worker


class Rude(ScriptedWorker):
    """Takes its first session and says nothing."""

    num_sessions = 0

    async def Session(self, requests: Any, context: Any) -> AsyncGenerator[Any, None]:
        self.num_sessions += 1
        if self.num_sessions == 1:
            await asyncio.Event().wait()
        async for message in super().Session(requests, context):
            yield message


class Mute(ScriptedWorker):
    """Does not answer the first question for its model."""

    num_asked = 0

    async def GetModel(self, request: Any, context: Any) -> worker_pb2.GetModelResponse:
        self.num_asked += 1
        if self.num_asked == 1:
            await asyncio.Event().wait()
        return await super().GetModel(request, context)


class Line:
    """A worker and a gateway's line to it."""

    def __init__(self, folder: Path, worker: ScriptedWorker) -> None:
        self.worker = worker
        self.address = f"unix:{folder}/worker.sock"
        self.changed = asyncio.Event()
        self.link = WorkerLink(self.address, "g0", model_seen=self._seen, changed=self.changed.set)

    async def _seen(self, model: Any) -> bool:
        return True

    async def until(self, connected: bool) -> None:
        """Wait until the line is, or is not."""
        while self.link.view().connected is not connected:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)


@asynccontextmanager
async def _line(folder: Path, worker: ScriptedWorker) -> AsyncIterator[Line]:
    line = Line(folder, worker)
    server = await start_worker(worker, line.address)
    running = asyncio.create_task(line.link.run())
    yield line
    running.cancel()
    await line.link.close()
    await server.stop(None)


def _job() -> WorkerJob:
    request = WorkerRequest(
        request_id="r",
        tenant="t",
        prompt_ids=(97,),
        sampling=SamplingParams(max_tokens=5, seed=1),
    )
    return WorkerJob(request, "base", deadline_s=now_s() + 60)


async def test_a_session_that_can_send_nothing_up_is_left_for_another(tmp_path: Path) -> None:
    """Its status stream stands, so nothing but the session itself shows that it is dead."""
    async with _line(tmp_path, ScriptedWorker(script=endless, step_s=3600)) as line:
        await line.until(connected=True)
        stream = line.link.submit(_job())
        first = line.link._session
        assert first is not None
        first._outbox.put_notice("no message")  # type: ignore[arg-type]
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(stream.next(), 30)
        await line.until(connected=False)
        await line.until(connected=True)
        assert line.link._session is not first


async def test_a_worker_that_does_not_welcome_is_dialled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "OPEN_TIMEOUT_S", 0.2)
    async with _line(tmp_path, worker := Rude()) as line:
        await line.until(connected=True)
        assert worker.num_sessions >= 2


async def test_a_worker_that_does_not_say_what_it_serves_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "OPEN_TIMEOUT_S", 0.2)
    async with _line(tmp_path, worker := Mute()) as line:
        await line.until(connected=True)
        assert worker.num_asked >= 2


async def test_a_surprise_in_reading_a_model_does_not_end_the_line(tmp_path: Path) -> None:
    async with _line(tmp_path, ScriptedWorker()) as line:
        await line.until(connected=True)
        surprises = [LoraplexError("no"), ValueError("not expected")]

        async def seen(model: Any) -> bool:
            if surprises:
                raise surprises.pop()
            return True

        line.link._model_seen = seen
        first = line.link._session
        assert first is not None
        first._call.cancel()
        await line.until(connected=False)
        await line.until(connected=True)
        assert surprises == []


async def test_it_is_logged_why_a_lost_worker_cannot_be_reached_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    line = Line(tmp_path, ScriptedWorker())
    server = await start_worker(line.worker, line.address)
    running = asyncio.create_task(line.link.run())
    await line.until(connected=True)
    await server.stop(None)
    await eventually(lambda: "worker not reachable" in caplog.messages)
    assert "failed to connect" in caplog.records[-1].__dict__["problem"]
    running.cancel()
    await line.link.close()
