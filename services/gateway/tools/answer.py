"""Splits the text of a chat answer into reasoning, content and tool calls."""

from __future__ import annotations

import enum

from loraplex_services.gateway.text.chat_style import THINK, ThoughtMarks
from loraplex_services.gateway.tools.reader import (
    MAX_SPACE_CHARS,
    AnswerReader,
    Delta,
    before_space,
    settled,
)


class _State(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    THOUGHT = enum.auto()
    """After the closing mark, before the content."""
    CONTENT = enum.auto()


class AnswerParser:
    """Parses one answer as it grows. The result does not depend on how the text was split.

    White space next to the marks of a thought is dropped.
    """

    def __init__(
        self,
        *,
        thinks: bool,
        is_thinking: bool,
        tools: AnswerReader | None,
        marks: ThoughtMarks = THINK,
    ) -> None:
        """
        Args:
            thinks: the answer may begin with a thought between marks.
            is_thinking: the prompt ended inside a thought.
            tools: finds calls outside of the thought; None if no tools were offered.
            marks: around a thought.
        """
        self._opens, self._closes = marks.opens + marks.title, marks.closes
        self._state = _State.START if thinks or is_thinking else _State.CONTENT
        self._is_thinking = is_thinking
        self._tools = tools
        self._buffer = ""
        self._has_thought = False
        """True if the thought contains more than white space."""
        self._num_chars = 0
        """Characters fed so far, until the content begins."""
        self._thought_chars = (0, 0)
        self.content_begin = 0
        """Character offset in the answer at which its content begins, once the thought is over."""

    @property
    def num_calls(self) -> int:
        """Calls found so far."""
        return self._tools.num_calls if self._tools is not None else 0

    @property
    def thought_chars(self) -> tuple[int, int]:
        """Begin and end of the thought between its marks, as character offsets in the answer."""
        begin, end = self._thought_chars
        return (begin, self._num_chars) if self._state is _State.THINKING else (begin, end)

    @property
    def may_think(self) -> bool:
        """Whether more of the thought may follow."""
        return self._state in (_State.START, _State.THINKING)

    def feed(self, text: str) -> Delta:
        """Parse the next part of the text. Returns what it adds to the answer."""
        if self._state is _State.CONTENT:
            return self._content(text)
        self._buffer += text
        self._num_chars += len(text)
        if self._state is _State.START and not self._begin():
            return Delta()
        reasoning = self._thought() if self._state is _State.THINKING else ""
        if self._state is _State.THOUGHT:
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = _State.CONTENT
        delta = Delta()
        if self._state is _State.CONTENT:
            delta = self._content(self._buffer)
            self._buffer = ""
        delta.reasoning = reasoning
        return delta

    def finish(self) -> Delta:
        """End the text. Returns what was held back."""
        held, self._buffer = self._buffer, ""
        if self._state is _State.THINKING:
            return Delta(reasoning=held)
        if self._state is _State.THOUGHT:
            held = ""
        delta = self._content(held) if held else Delta()
        if self._tools is not None:
            delta.add(self._tools.finish())
        return delta

    def _begin(self) -> bool:
        """Detect whether there is a thought; False while undecided. Mutates: state, buffer."""
        shown = self._buffer.lstrip()
        may_open = len(self._buffer) - len(shown) <= MAX_SPACE_CHARS
        if may_open and self._opens.startswith(shown) and shown != self._opens:
            return False
        opens = may_open and shown.startswith(self._opens)
        if opens or self._is_thinking:
            self._buffer = shown.removeprefix(self._opens) if opens else shown
            self._state = _State.THINKING
            begin = self._num_chars - len(self._buffer)
            self._thought_chars = (begin, begin)
        else:
            self._state = _State.CONTENT
        return True

    def _thought(self) -> str:
        """The new part of the thought. Mutates: state, buffer."""
        if not self._has_thought:
            self._buffer = self._buffer.lstrip()
            self._has_thought = bool(self._buffer)
        thought, mark, after = self._buffer.partition(self._closes)
        if mark:
            self._state, self._buffer = _State.THOUGHT, after
            end = self._num_chars - len(after) - len(mark)
            self._thought_chars = (self._thought_chars[0], end)
            self.content_begin = end + len(mark)
            return thought[: before_space(thought, len(thought))]
        end = settled(self._buffer, self._closes)
        thought, self._buffer = self._buffer[:end], self._buffer[end:]
        return thought

    def _content(self, text: str) -> Delta:
        return Delta(content=text) if self._tools is None else self._tools.feed(text)
