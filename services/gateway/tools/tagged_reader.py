"""Finds calls between an opening and a closing mark."""

from __future__ import annotations

from collections.abc import Callable

from loraplex_services.gateway.tools.reader import CallReader


class TaggedReader(CallReader):
    """Reads calls that end at the first closing mark."""

    def __init__(
        self, opens: str, closes: str, read_call: Callable[[str], tuple[str, str] | None]
    ) -> None:
        """`read_call` turns the text between the marks into a name and JSON of the arguments; None
        if it is no call."""
        super().__init__((opens,))
        self._closes = closes
        self._call_of = read_call

    def _read_call(self) -> bool:
        end = self._buffer.find(self._closes, self._at)
        if end < 0:
            self._at = max(self._at, len(self._buffer) - len(self._closes) + 1)
            return False
        call = self._call_of(self._buffer[len(self._mark) : end])
        if call is None:
            self._give_up()
        else:
            self._emit(end + len(self._closes), call)
        return True
