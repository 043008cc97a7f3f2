"""A scripted worker for the gateway's benchmark, without a model, that reports its own time.

A prompt of the single id `PROBE_ID` is answered at once with the microseconds between the arrival
of the request and its answer, in decimal. The rest of a probe's round trip is the gateway's.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from loraplex.v1 import common_pb2, worker_pb2
from tests.gateway.scripted_worker import ScriptedWorker, endless, start_worker

PROBE_ID = 1
HELD_S = 0.001


class TimedWorker(ScriptedWorker):
    """Answers probes with times, and all other requests with letters."""

    def _submit(self, peer: Any, request: worker_pb2.WorkerRequest) -> None:
        if list(request.prompt_ids) != [PROBE_ID]:
            super()._submit(peer, request)
            self.requests.clear()
            return
        arrival_s = time.monotonic()

        def answer() -> None:
            self._step += 1
            events = worker_pb2.StepEvents(step=self._step, tokens=[_time(request, arrival_s)])
            peer.outbox.put_nowait(worker_pb2.SessionResponse(events=events))

        asyncio.get_running_loop().call_later(HELD_S, answer)

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncGenerator[worker_pb2.WorkerServiceGenerateResponse]:
        """Answer a probe that comes as a call of its own."""
        arrival_s = time.monotonic()
        await asyncio.sleep(HELD_S)
        yield worker_pb2.WorkerServiceGenerateResponse(event=_time(request.request, arrival_s))


def _time(request: worker_pb2.WorkerRequest, arrival_s: float) -> worker_pb2.TokenEvent:
    """The answer to a probe."""
    return worker_pb2.TokenEvent(
        request_id=request.request_id,
        token_ids=str(round((time.monotonic() - arrival_s) * 1e6)).encode(),
        finish_reason=common_pb2.FINISH_REASON_LENGTH,
    )


async def serve(listen: str, step_s: float) -> None:
    """Serve until killed."""
    worker = TimedWorker(script=endless, step_s=step_s, max_model_len=1 << 20)
    server = await start_worker(worker, listen)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-s", type=float, required=True)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.listen, arguments.step_s))
