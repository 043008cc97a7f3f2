"""Stops a server process on signals: the first SIGTERM or SIGINT drains, the second one kills."""

from __future__ import annotations

import asyncio
import signal

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_event() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; a second signal ends the process at once."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_first() -> None:
        stopping.set()
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_first)
    return stopping
