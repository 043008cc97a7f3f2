"""Which reader an answer needs: by what was asked for, and by how its base writes calls."""

from __future__ import annotations

from services.gateway.text.chat_style import ToolFormat
from services.gateway.tools.glm_calls import GlmReader
from services.gateway.tools.python_calls import PythonReader
from services.gateway.tools.reader import (
    LIST,
    NOTATIONS,
    AnswerReader,
    CallDelta,
    Delta,
    ToolReader,
    new_call_id,
)
from services.gateway.tools.tool_use import ToolUse
from services.gateway.tools.xml_calls import XmlReader


class NamedReader:
    """An answer that is, by its grammar, the arguments of one given function."""

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
    """Leaves out all calls but the first: what `parallel_tool_calls: false` asks for."""

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


def reader_of(tool_format: ToolFormat, use: ToolUse) -> AnswerReader | None:
    """A reader for one answer; None where there are no tools, or the base writes no calls that we
    know. Required calls come as our own grammar has them, whatever the base."""
    if use.named:
        return NamedReader(use.named)
    if use.must_call:
        return ToolReader(LIST, frozenset())
    if not use.tools or tool_format is ToolFormat.NONE:
        return None
    reader = _reader_of(tool_format, use)
    return reader if use.is_parallel else FirstCallReader(reader)


def _reader_of(tool_format: ToolFormat, use: ToolUse) -> AnswerReader:
    if tool_format is ToolFormat.QWEN3_CODER:
        return XmlReader(use.schemas)
    if tool_format is ToolFormat.GLM:
        return GlmReader(use.schemas)
    if tool_format is ToolFormat.PYTHONIC:
        return PythonReader(use.names)
    return ToolReader(NOTATIONS[tool_format], use.names)
