"""Reads single keys from a terminal without waiting for a line."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Self


class Keyboard:
    """Reads keys inside its `with` block; without a terminal there are none."""

    def __init__(self) -> None:
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        self._saved: Any = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty() and sys.stdout.isatty():
            import termios
            import tty

            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
            asyncio.get_running_loop().add_reader(sys.stdin, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            import termios

            asyncio.get_running_loop().remove_reader(sys.stdin)
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)
            print()

    async def pressed(self, within_s: float) -> str:
        """The next key, or "" after a time."""
        try:
            async with asyncio.timeout(within_s):
                return await self._keys.get()
        except TimeoutError:
            return ""

    def _read(self) -> None:
        self._keys.put_nowait(sys.stdin.read(1))
