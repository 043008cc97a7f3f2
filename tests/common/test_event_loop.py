"""The event loop of the servers' processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from loraplex_services.common.processes.event_loop import new_loop

_STARTS = """
import asyncio, sys
from loraplex_services.common.processes.event_loop import new_loop

async def main():
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            while True:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    calls = [asyncio.create_task(call()) for _ in range(4)]
    for _ in range(100):
        process = await asyncio.create_subprocess_exec("/bin/true")
        await process.wait()
    for task in calls:
        task.cancel()
    await server.stop(None)

with asyncio.Runner(loop_factory=new_loop) as runner:
    runner.run(main())
"""


def test_the_loops_clock_moves_while_a_callback_runs() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        begin_s, begun_s = loop.time(), time.monotonic()
        while time.monotonic() < begun_s + 1e-4:
            pass
        assert 1e-4 <= loop.time() - begin_s
        assert abs(loop.time() - time.monotonic()) < 0.5
        await asyncio.wait_for(asyncio.sleep(0.01), 5.0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_grpc_takes_no_part_in_starts_of_processes() -> None:
    """It says so whenever it gives up waiting for its threads, and else may wait forever."""
    pytest.importorskip("uvloop")
    run = subprocess.run(
        [sys.executable, "-c", _STARTS], capture_output=True, text=True, timeout=60, check=True
    )
    assert "fork" not in run.stderr
