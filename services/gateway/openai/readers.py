"""Which reader an answer needs: by what was asked for, and by how its base writes calls."""

from __future__ import annotations

from services.gateway.chat_style import ToolFormat
from services.gateway.openai.python_calls import PythonReader
from services.gateway.openai.tool_reader import (
    LIST,
    NOTATIONS,
    AnswerReader,
    CallDelta,
    Delta,
    ToolReader,
    new_call_id,
)
from services.gateway.openai.tools import ToolUse
from services.gateway.openai.xml_calls import XmlReader


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


def reader_of(tool_format: ToolFormat, use: ToolUse) -> AnswerReader | None:
    """A reader for one answer; None where there are no tools, or the base writes no calls that we
    know. Required calls come as our own grammar has them, whatever the base."""
    if use.named:
        return NamedReader(use.named)
    if use.must_call:
        return ToolReader(LIST, frozenset())
    if not use.tools or tool_format is ToolFormat.NONE:
        return None
    if tool_format is ToolFormat.QWEN3_CODER:
        return XmlReader(use.schemas)
    if tool_format is ToolFormat.PYTHONIC:
        return PythonReader(use.names)
    return ToolReader(NOTATIONS[tool_format], use.names)
