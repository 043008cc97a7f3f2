"""Chooses the reader of an answer by the request and by the format of its base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from loraplex_services.gateway.text.chat_style import ToolFormat
from loraplex_services.gateway.tools.gemma_calls import gemma_call
from loraplex_services.gateway.tools.glm_calls import glm_call
from loraplex_services.gateway.tools.harmony import HarmonyReader
from loraplex_services.gateway.tools.json_calls import LIST, NOTATIONS, JsonReader, Notation
from loraplex_services.gateway.tools.python_calls import PythonReader
from loraplex_services.gateway.tools.reader import (
    AnswerReader,
    Delta,
    ToolCall,
    new_call_id,
    valid_json,
)
from loraplex_services.gateway.tools.tagged_reader import TaggedReader
from loraplex_services.gateway.tools.tool_use import ToolUse
from loraplex_services.gateway.tools.xml_calls import XmlReader


class ArgumentsReader:
    """Reads an answer that consists of the arguments of one given function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        self._text += text
        return Delta()

    def finish(self) -> Delta:
        arguments = valid_json(self._text)
        if arguments is None:
            return Delta()
        self.num_calls = 1
        return Delta(calls=[ToolCall(0, new_call_id(), self._name, arguments)])


class FilteredReader:
    """Shows a part of what another reader finds."""

    def __init__(self, reader: AnswerReader, shown: Callable[[Delta], Delta]) -> None:
        self._reader = reader
        self._shown = shown

    @property
    def num_calls(self) -> int:
        """Calls found so far, whether they are shown or not."""
        return self._reader.num_calls

    def feed(self, text: str) -> Delta:
        return self._shown(self._reader.feed(text))

    def finish(self) -> Delta:
        return self._shown(self._reader.finish())


def _only_calls(delta: Delta) -> Delta:
    """If calls are required, content can only be the rest of a call that was cut off."""
    return replace(delta, content="")


def _first_call(delta: Delta) -> Delta:
    """Keep only the first call, for `parallel_tool_calls: false`."""
    return replace(delta, calls=[call for call in delta.calls if call.index == 0])


def _json_reader(notation: Notation) -> Callable[[ToolUse], AnswerReader]:
    return lambda use: JsonReader(notation, use.names)


_READERS: dict[ToolFormat, Callable[[ToolUse], AnswerReader]] = {
    **{tool_format: _json_reader(notation) for tool_format, notation in NOTATIONS.items()},
    ToolFormat.QWEN3_CODER: lambda use: XmlReader(use.schemas),
    ToolFormat.GLM: lambda use: TaggedReader(
        "<tool_call>", "</tool_call>", lambda body: glm_call(body, use.schemas)
    ),
    ToolFormat.GEMMA4: lambda use: TaggedReader("<|tool_call>", "<tool_call|>", gemma_call),
    ToolFormat.PYTHONIC: lambda use: PythonReader(use.names),
    ToolFormat.HARMONY: lambda use: HarmonyReader(offers_tools=bool(use.tools)),
}
"""How to read the calls of each format. A new format needs a row here or in `NOTATIONS`."""


def reader_of(tool_format: ToolFormat, use: ToolUse) -> AnswerReader | None:
    """A reader for one answer; None if nothing is to be found in it: without tools (except for
    channels), or if the base writes no known calls.

    Required calls of a base without a notation are read in that of our own grammar.
    """
    if not use.tools and tool_format is not ToolFormat.HARMONY:
        return None
    if tool_format in _READERS:
        reader = _READERS[tool_format](use)
        if use.must_call:
            return FilteredReader(reader, _only_calls)
        return reader if use.is_parallel else FilteredReader(reader, _first_call)
    if use.named:
        return ArgumentsReader(use.named)
    if use.must_call:
        return FilteredReader(JsonReader(LIST, frozenset()), _only_calls)
    return None
