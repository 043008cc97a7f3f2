"""How the supervisor takes signals; with children it is tested in test_up.py."""

from __future__ import annotations

import subprocess
import sys

TWO_SIGNALS = """
import asyncio, os, signal, sys
from loraplex_services.up import supervisor

async def main():
    loop = asyncio.get_running_loop()
    running = loop.create_task(supervisor.Supervisor([], 1.0, "").run())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    return await running

sys.exit(asyncio.run(main()))
"""


def test_one_signal_that_arrives_twice_drains() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
