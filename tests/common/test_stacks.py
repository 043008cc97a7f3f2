"""What a process says of itself on SIGUSR2."""

from __future__ import annotations

import signal
import subprocess
import sys

SERVICE = """
import asyncio
from loraplex_services.common.processes.stacks import print_stacks_on_signal

async def numbers():
    print("ready", flush=True)
    await asyncio.Event().wait()
    yield 1

async def read():
    async for _ in numbers():
        pass

async def main():
    print_stacks_on_signal()
    await asyncio.create_task(read(), name="reader")

asyncio.run(main())
"""


def test_a_process_prints_its_threads_and_what_its_tasks_await() -> None:
    command = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        lines = []
        while not (lines and lines[-1].startswith("task reader")):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        process.kill()
    assert any("most recent call first" in line for line in lines)
    assert "read (" in lines[-1] and "> numbers (" in lines[-1] and "Event.wait" in lines[-1]
