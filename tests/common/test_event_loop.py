"""The event loop of the servers' processes."""

from __future__ import annotations

import asyncio
import time

from loraplex_services.common.processes.event_loop import new_loop


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
