"""Reads answers in gpt-oss's Harmony format: messages, each on a channel.

    <|channel|>analysis<|message|>A thought.<|end|><|start|>assistant
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

(without the line break). `analysis` is a thought, `final` the content, and so is `commentary`
without a recipient. The prompt ends with `<|start|>assistant`. An answer that begins with no header
is content as a whole, as a grammar may make it.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import enum
import re

from loraplex_services.gateway.tools.reader import (
    Delta,
    ToolCall,
    cut_at_mark,
    new_call_id,
    valid_json,
)

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]{1,128})")
_FINAL = re.compile(r"<\|channel\|>\s*(final|commentary)\b")
_FIRST = (_CHANNEL, "to=")
_MAX_HEADER_CHARS = 512


class _Kind(enum.Enum):
    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


class HarmonyReader:
    """Implements `AnswerReader`. White space before the end of a message is dropped."""

    def __init__(self, *, offers_tools: bool) -> None:
        """Without `offers_tools`, calls are content."""
        self._offers_tools = offers_tools
        self._buffer = ""
        self._kind: _Kind | None = None
        """Kind of the message that is being read; None in a header."""
        self._name = ""
        self._arguments = ""
        self._is_first = True
        """Whether no header has ended yet."""
        self._is_plain = False
        self._begun: set[_Kind] = set()
        """Kinds that have text; the next message of one begins a paragraph."""
        self._begins = False
        self._delta = Delta()
        self._num_fed = 0
        """Number of characters fed so far. The buffer holds the last of them."""
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        self._buffer += text
        self._num_fed += len(text)
        while self._buffer and (self._header() if self._kind is None else self._message()):
            pass
        return self._taken()

    def finish(self) -> Delta:
        if self._kind is not None or self._is_first:
            self._add_text(self._buffer, self._num_fed - len(self._buffer))
        self._buffer = ""
        self._end()
        return self._taken()

    def _taken(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def _header(self) -> bool:
        """Read a header. Returns False if it has not ended. Mutates: kind, buffer."""
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if self._is_first and not _may_be_header(header):
            self._kind, self._is_plain = _Kind.CONTENT, True
            return True
        if not mark:
            return False
        self._buffer, self._is_first = rest, False
        recipient = _RECIPIENT.search(header)
        self._kind = _Kind.CONTENT if _FINAL.search(header) else _Kind.THOUGHT
        if recipient is not None and self._offers_tools:
            self._kind, self._name, self._arguments = _Kind.CALL, recipient[1], ""
        self._begins = self._kind in self._begun
        return True

    def _message(self) -> bool:
        """Read a message. Returns False if it has not ended. Mutates: kind, buffer."""
        begin = self._num_fed - len(self._buffer)
        if self._is_plain:
            self._add_text(self._buffer, begin)
            self._buffer = ""
            return False
        shown, mark, self._buffer = cut_at_mark(self._buffer, _ENDS)
        self._add_text(shown, begin)
        if mark:
            self._end()
        return bool(mark)

    def _add_text(self, text: str, begin: int) -> None:
        """Add text to the message. `begin` is its offset in the answer."""
        if not text:
            return
        if self._kind is _Kind.THOUGHT:
            self._delta.thoughts.append((begin, begin + len(text)))
        if self._kind is _Kind.CALL:
            self._arguments += text
            return
        kind = self._kind or _Kind.CONTENT
        text = "\n\n" + text if self._begins else text
        self._begins = False
        self._begun.add(kind)
        if kind is _Kind.THOUGHT:
            self._delta.reasoning += text
        else:
            self._delta.content += text

    def _end(self) -> None:
        """End a message. A call whose arguments are not JSON becomes content."""
        if self._kind is _Kind.CALL:
            arguments = valid_json(self._arguments.strip() or "{}")
            if arguments is None:
                self._kind, text = _Kind.CONTENT, self._arguments
                self._begins = _Kind.CONTENT in self._begun
                self._add_text(text, self._num_fed - len(self._buffer))
            else:
                call = ToolCall(self.num_calls, new_call_id(), self._name, arguments)
                self._delta.calls.append(call)
                self.num_calls += 1
        self._kind = None


def _may_be_header(text: str) -> bool:
    """Whether an answer may begin with a header that begins with `text`."""
    shown = text.lstrip()
    if len(text) > _MAX_HEADER_CHARS:
        return False
    return any(shown.startswith(mark) or mark.startswith(shown) for mark in _FIRST)
