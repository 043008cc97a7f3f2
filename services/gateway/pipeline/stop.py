"""Stop strings: finds the first one in a growing text and never lets half of one out.

The result depends on the text only, not on how it was cut: the stop string that is complete first
wins, of several complete at the same character the longest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """What may go out, and the stop string that was met, if any."""

    text: str
    matched: str | None = None


class StopScanner:
    """Holds back the longest end of the text that may become a stop string."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """`stops` are non-empty; `include` lets the matched one out with the text before it."""
        assert all(stops), "empty stop string"
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> Scan:
        """Add text. After a match nothing more must be pushed."""
        if not self._stops:
            return Scan(text)
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            end, start = match
            self._held = ""
            return Scan(buffer[: end if self._include else start], buffer[start:end])
        cut = len(buffer) - self._held_back(buffer)
        self._held = buffer[cut:]
        return Scan(buffer[:cut])

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int] | None:
        """(end, start) of the match that ends first, then starts first."""
        matches = [(at + len(s), at) for s in self._stops if (at := buffer.find(s)) >= 0]
        return min(matches, default=None)

    def _held_back(self, buffer: str) -> int:
        """Length of the longest end of the buffer that begins a stop string."""
        longest = min(len(buffer), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
