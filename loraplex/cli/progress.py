"""A progress bar for transfers, on a terminal only."""

from __future__ import annotations

import sys
import time
from typing import Self

from loraplex.cli.output import sized

WIDTH = 28
REDRAW_S = 0.1


class ProgressBar:
    """Draws one line on stderr and erases it at the end. Call it as a transfer's `progress`."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._phase = ""
        self._shown = sys.stderr.isatty()
        self._started_s = self._drawn_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._drawn_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if not self._shown:
            return
        now_s = time.monotonic()
        if phase != self._phase:
            self._phase, self._started_s = phase, now_s
        elif now_s - self._drawn_s < REDRAW_S and done_bytes < total_bytes:
            return
        self._drawn_s = now_s
        sys.stderr.write("\r" + self._line(done_bytes, total_bytes, now_s) + "\x1b[K")
        sys.stderr.flush()

    def _line(self, done_bytes: int, total_bytes: int, now_s: float) -> str:
        share = done_bytes / total_bytes if total_bytes else 1.0
        filled = int(share * WIDTH)
        bar = "#" * filled + "-" * (WIDTH - filled)
        rate = sized(done_bytes / max(now_s - self._started_s, 1e-3))
        return f"{self._title} {self._phase:8} [{bar}] {share:4.0%} {sized(total_bytes)} {rate}/s"
