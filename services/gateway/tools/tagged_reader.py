"""Finds calls between an opening and a closing mark in the growing text of an answer.

A call is emitted when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable

from loraplex_services.gateway.tools.reader import Delta, ToolCall, cut_at_mark, new_call_id


class TaggedReader:
    """Splits one answer into text and calls; marks without a call remain text."""

    def __init__(
        self, opens: str, closes: str, read_call: Callable[[str], tuple[str, str] | None]
    ) -> None:
        """`read_call` turns the text between the marks into a name and JSON of the arguments; None
        if it is no call."""
        self._opens = opens
        self._closes = closes
        self._read_call = read_call
        self._buffer = ""
        self._opening = ""
        """The mark of an open call and the white space before it, which are text if no call
        follows."""
        self._num_searched = 0
        """Number of characters of an open call that were searched and contain no closing mark."""
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        """Parse the next part of the text. Returns what it adds to the answer."""
        self._buffer += text
        delta = Delta()
        while self._buffer and (self._close(delta) if self._opening else self._open(delta)):
            pass
        return delta

    def finish(self) -> Delta:
        """End the text. An incomplete call becomes text."""
        text, self._buffer = self._opening + self._buffer, ""
        return Delta(content="" if self.num_calls and text.isspace() else text)

    def _open(self, delta: Delta) -> bool:
        """Text up to the next mark; False without one. Mutates: delta."""
        shown, self._opening, self._buffer = cut_at_mark(self._buffer, (self._opens,))
        delta.content += shown
        self._num_searched = 0
        return bool(self._opening)

    def _close(self, delta: Delta) -> bool:
        """Read one call up to its closing mark; False if that has not arrived. Mutates: delta."""
        end = self._buffer.find(self._closes, self._num_searched)
        if end < 0:
            self._num_searched = max(0, len(self._buffer) - len(self._closes) + 1)
            return False
        body, self._buffer = self._buffer[:end], self._buffer[end + len(self._closes) :]
        opening, self._opening = self._opening, ""
        call = self._read_call(body)
        if call is None:
            delta.content += opening + body + self._closes
            return True
        delta.calls.append(ToolCall(self.num_calls, new_call_id(), *call))
        self.num_calls += 1
        return True
