"""Chooses the reader of an answer by the request and by the format of its base."""

from __future__ import annotations

from collections.abc import Callable

from loraplex_services.gateway.text.chat_style import ToolFormat
from loraplex_services.gateway.tools.glm_calls import GlmReader
from loraplex_services.gateway.tools.python_calls import PythonReader
from loraplex_services.gateway.tools.reader import (
    LIST,
    NOTATIONS,
    AnswerReader,
    CallDelta,
    Delta,
    Notation,
    ToolReader,
    new_call_id,
)
from loraplex_services.gateway.tools.tool_use import ToolUse
from loraplex_services.gateway.tools.xml_calls import XmlReader


class NamedReader:
    """Reads an answer that is, by its grammar, the arguments of one given function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        calls = [CallDelta(0, arguments=text)] if text else []
        if text and self.num_calls == 0:
            self.num_calls = 1
            calls.insert(0, CallDelta(0, new_call_id(), self._name))
        return Delta(calls=calls)

    def finish(self) -> Delta:
        return Delta()


class FirstCallReader:
    """Drops all calls but the first, for `parallel_tool_calls: false`."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    @property
    def num_calls(self) -> int:
        """Calls shown so far."""
        return min(self._reader.num_calls, 1)

    def feed(self, text: str) -> Delta:
        return _first_call(self._reader.feed(text))

    def finish(self) -> Delta:
        return _first_call(self._reader.finish())


def _first_call(delta: Delta) -> Delta:
    """Mutates: delta."""
    delta.calls = [call for call in delta.calls if call.index == 0]
    return delta


def _json_reader(notation: Notation) -> Callable[[ToolUse], AnswerReader]:
    return lambda use: ToolReader(notation, use.names)


_READERS: dict[ToolFormat, Callable[[ToolUse], AnswerReader]] = {
    **{tool_format: _json_reader(notation) for tool_format, notation in NOTATIONS.items()},
    ToolFormat.QWEN3_CODER: lambda use: XmlReader(use.schemas),
    ToolFormat.GLM: lambda use: GlmReader(use.schemas),
    ToolFormat.PYTHONIC: lambda use: PythonReader(use.names),
}
"""How to read the calls of each format. A new format needs a row here or in `NOTATIONS`."""


def reader_of(tool_format: ToolFormat, use: ToolUse) -> AnswerReader | None:
    """A reader for one answer; None without tools, or if the base writes no known calls.

    Required calls are read in the notation of our own grammar, whatever the base.
    """
    if use.named:
        return NamedReader(use.named)
    if use.must_call:
        return ToolReader(LIST, frozenset())
    if not use.tools or tool_format not in _READERS:
        return None
    reader = _READERS[tool_format](use)
    return reader if use.is_parallel else FirstCallReader(reader)
