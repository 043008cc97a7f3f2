"""Finds tool calls in the growing text of an answer.

The result does not depend on how the text was split, so that a stream adds up to the complete
answer. A call is emitted when it is complete, so a truncated answer never contains a partial call.
"""

from __future__ import annotations

import enum
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call."""

    index: int
    call_id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(slots=True)
class Delta:
    """New output of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    thoughts: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of each thought that the reader itself found, as character offsets in the text
    that it was fed."""

    def add(self, later: Delta) -> None:
        """Append later output."""
        self.content += later.content
        self.reasoning += later.reasoning
        self.calls += later.calls
        self.thoughts += later.thoughts


class AnswerReader(Protocol):
    """Splits the text of one answer."""

    @property
    def num_calls(self) -> int:
        """Calls found so far."""

    def feed(self, text: str) -> Delta:
        """Parse the next part of the text. Returns what it adds to the answer."""

    def finish(self) -> Delta:
        """End the text and return what was held back."""


MAX_SPACE_CHARS = 1024
"""White space beyond this many characters is text, so that little of it is held back and looked at
again for each token."""


class State(enum.Enum):
    """The kind of text with which the buffer of a `CallReader` begins."""

    TEXT = enum.auto()
    CALL = enum.auto()
    """A mark, or a call without one, that is not complete."""
    AFTER_CALL = enum.auto()
    """The text after a call, perhaps another call that needs no mark."""


class CallReader(ABC):
    """Splits one answer into text and calls; a subclass reads the calls of one notation.

    A mark that no complete call follows is text. White space around calls belongs to neither, up to
    `MAX_SPACE_CHARS`.
    """

    def __init__(self, opens: Sequence[str], *, id_chars: int = 0) -> None:
        """
        Args:
            opens: marks before calls.
            id_chars: number of characters of a call id; 0 = as many as we choose.
        """
        self._opens = opens
        self._id_chars = id_chars
        self._state = State.TEXT
        self._buffer = ""
        self._mark = ""
        """The mark that the buffer begins with, and the white space before it."""
        self._at = 0
        """Offset in the buffer of what `_read_call` has not read."""
        self._delta = Delta()
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        self._buffer += text
        while self._buffer and self._read():
            pass
        return self._taken()

    def finish(self) -> Delta:
        """End the text. A call that is not complete is text."""
        if self._state is not State.AFTER_CALL:
            self._delta.content += self._buffer
        return self._taken()

    def _taken(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def _read(self) -> bool:
        """Read on. Like all methods that read, it returns False if it needs more text."""
        if self._state is State.CALL:
            return self._read_call()
        return self._read_text() if self._state is State.TEXT else self._read_after_call()

    def _read_text(self) -> bool:
        """Read up to the next mark."""
        shown, self._mark, rest = cut_at_mark(self._buffer, self._opens)
        self._delta.content += shown
        self._buffer, self._at = self._mark + rest, len(self._mark)
        if self._mark:
            self._state = State.CALL
        return bool(self._mark)

    @abstractmethod
    def _read_call(self) -> bool:
        """Read on from `_at`, and call `_emit` or `_give_up` once it is known whether it is a
        call."""

    def _read_after_call(self) -> bool:
        if len(self._buffer) <= MAX_SPACE_CHARS and self._buffer.isspace():
            return False
        self._state = State.TEXT
        return True

    def _emit(self, end: int, *calls: tuple[str, str]) -> None:
        """Report the names and arguments of calls that end at an offset in the buffer."""
        for name, arguments in calls:
            call = ToolCall(self.num_calls, new_call_id(self._id_chars), name, arguments)
            self._delta.calls.append(call)
            self.num_calls += 1
        self._buffer, self._mark, self._at = self._buffer[end:], "", 0
        self._state = State.AFTER_CALL

    def _give_up(self) -> None:
        """Treat the mark as text, because no call follows, and read what follows as text."""
        self._delta.content += self._mark
        self._buffer, self._mark, self._at = self._buffer[len(self._mark) :], "", 0
        self._state = State.TEXT


def valid_json(text: str) -> str | None:
    """The text if it is JSON, with unescaped line breaks in strings escaped; otherwise None."""
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        try:
            return json.dumps(json.loads(text, strict=False), ensure_ascii=False, allow_nan=False)
        except ValueError:
            return None
    except RecursionError:
        return None
    return text


def _refuse(word: str) -> NoReturn:
    """Refuse NaN and infinities, which `json.loads` accepts by default."""
    raise ValueError(f"{word} is not JSON")


def settled(text: str, mark: str) -> int:
    """Number of characters before what may become white space and `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return before_space(text, len(text) - length)
    return before_space(text, len(text))


def before_space(text: str, end: int) -> int:
    """Where the white space before `end` begins, of which the last `MAX_SPACE_CHARS` count."""
    begin = max(end - MAX_SPACE_CHARS, 0)
    return begin + len(text[begin:end].rstrip())


def cut_at_mark(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Text before the first of `marks`; the white space and the mark; what follows.

    Without a mark: what can be shown already, "", and what may become white space and a mark.
    """
    found = [(index, mark) for mark in marks if (index := text.find(mark)) >= 0]
    if not found:
        end = min((settled(text, mark) for mark in marks), default=len(text))
        return text[:end], "", text[end:]
    index, mark = min(found)
    begin, end = before_space(text, index), index + len(mark)
    return text[:begin], text[begin:end], text[end:]


def new_call_id(num_chars: int = 0) -> str:
    """A new call id. Mistral's templates require exactly nine letters or digits."""
    return (
        secrets.token_hex(num_chars)[:num_chars] if num_chars else f"call_{secrets.token_hex(12)}"
    )
