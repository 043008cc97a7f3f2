"""The interface by which long operations report their progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in all); a phase is one word, such as "upload"."""


def ignore_progress(phase: str, done_bytes: int, total_bytes: int) -> None:
    """Does nothing, for callers that show no progress."""
