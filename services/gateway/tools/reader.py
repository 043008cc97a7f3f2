"""Finds tool calls in the growing text of an answer.

The result does not depend on how the text was split, so that a stream adds up to the complete
answer. A call is emitted when it is complete, so a truncated answer never contains a partial call.
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from loraplex_services.gateway.text.chat_style import ToolFormat
from loraplex_services.gateway.tools.json_call import BareCall, CallReader

_NAMED_CALL = re.compile(r"\s*([\w.-]{1,128})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_MAX_HEAD_CHARS = 256
_SPACE = " \t\r\n"


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


class AnswerReader(Protocol):
    """Splits the text of one answer."""

    @property
    def num_calls(self) -> int:
        """Calls found so far."""

    def feed(self, text: str) -> Delta:
        """Parse the next part of the text. Returns what it adds to the answer."""

    def finish(self) -> Delta:
        """End the text and return what was held back."""


@dataclass(frozen=True, slots=True)
class Notation:
    """How a JSON format writes calls."""

    opens: tuple[str, ...] = ()
    """Marks before calls, any of them; empty = the whole answer consists of calls."""
    closes: str = ""
    """Mark after a call."""
    separators: str = ""
    """Characters between objects, besides white space."""
    starts_with_brace: bool = False
    """An answer that begins with a brace may be a call even without the mark."""
    names_come_first: bool = False
    """Whether a call may be `name{arguments}` instead of an object."""
    id_chars: int = 0
    """Number of characters of a call id; 0 = as many as we choose."""


NOTATIONS = {
    ToolFormat.HERMES: Notation(("<tool_call>",), "</tool_call>"),
    ToolFormat.LLAMA3_JSON: Notation(("<|python_tag|>",), "", ";,", starts_with_brace=True),
    ToolFormat.MISTRAL: Notation(("[TOOL_CALLS]",), "", ",", names_come_first=True, id_chars=9),
    ToolFormat.PHI4_MINI: Notation(("<|tool_call|>", "functools"), "<|/tool_call|>", ","),
}
LIST = Notation(separators=",")
"""What a grammar makes of required calls if the base has no notation of its own."""


class _State(enum.Enum):
    START = enum.auto()
    TEXT = enum.auto()
    EXPECT = enum.auto()
    """After a mark or a call."""
    NAME = enum.auto()
    CALL = enum.auto()


class ToolReader:
    """Splits one answer into text and calls.

    A mark without a complete call and an object that names no function remain text. White space
    around calls belongs to neither.
    """

    def __init__(self, notation: Notation, names: Set[str]) -> None:
        """`names`: the functions offered; answers that are calls by their shape alone must name
        one of them."""
        self._notation = notation
        self._names = names
        self._state = _State.START if notation.opens else _State.EXPECT
        self._buffer = ""
        self._opening = self._unsure = ""
        """A mark and the text since then, which become text again if no call follows."""
        self._is_doubtful = True
        self._in_list = False
        self._call: CallReader | BareCall | None = None
        self._delta = Delta()
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        self._buffer += text
        steps = {
            _State.START: self._start,
            _State.TEXT: self._text,
            _State.EXPECT: self._expect,
            _State.NAME: self._named,
            _State.CALL: self._read_call,
        }
        while self._buffer and steps[self._state]():
            pass
        return self._taken()

    def finish(self) -> Delta:
        if self._is_doubtful or self._state is _State.TEXT:
            self._delta.content += self._opening + self._unsure + self._buffer
        return self._taken()

    def _taken(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def _start(self) -> bool:
        shown = self._buffer.lstrip()
        if not shown:
            return False
        is_call = self._notation.starts_with_brace and shown[0] == "{"
        self._state = _State.EXPECT if is_call else _State.TEXT
        return True

    def _text(self) -> bool:
        shown, opening, self._buffer = cut_at_mark(self._buffer, self._notation.opens)
        self._delta.content += shown
        if not opening:
            return False
        self._opening = opening
        self._state, self._is_doubtful = _State.EXPECT, True
        return True

    def _expect(self) -> bool:
        rest = self._buffer.lstrip(_SPACE + self._notation.separators)
        self._leave(len(self._buffer) - len(rest))
        if not rest:
            return False
        closes = "" if self._is_doubtful else self._notation.closes
        if rest[0] == "{":
            self._begin(CallReader(self._accepts, only_call_keys=self._goes_by_shape))
        elif rest[0] == "[" and self._is_doubtful and not self._in_list:
            self._in_list = True
            self._leave(1)
        elif rest[0] == "]" and self._in_list and not self._is_doubtful:
            self._in_list = False
            self._leave(1)
            self._state = _State.EXPECT if closes else _State.TEXT
        elif closes and rest.startswith(closes):
            self._leave(len(closes))
            self._state = _State.TEXT
        elif closes and closes.startswith(rest):
            return False
        elif self._notation.names_come_first and self._is_doubtful and not self._in_list:
            self._state = _State.NAME
        else:
            self._give_up()
        return True

    def _named(self) -> bool:
        head, brace, _ = self._buffer.partition("{")
        match = _NAMED_CALL.fullmatch(head)
        if brace and match:
            self._leave(len(head))
            self._begin(BareCall(match[1]))
        elif brace or len(head) > _MAX_HEAD_CHARS:
            self._give_up()
        else:
            return False
        return True

    def _begin(self, call: CallReader | BareCall) -> None:
        self._call, self._state, self._is_doubtful = call, _State.CALL, True

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        num_read = 0
        for char in self._buffer:
            if not call.push(char):
                break
            num_read += 1
            if call.is_done or call.is_broken:
                break
        self._leave(num_read)
        if call.is_broken or (call.is_done and not self._report(call)):
            self._give_up()
            return True
        if call.is_done:
            self._call = None
            self._state = _State.TEXT if isinstance(call, BareCall) else _State.EXPECT
        return call.is_done

    def _report(self, call: CallReader | BareCall) -> bool:
        """Emit a complete call; False if its arguments are not JSON."""
        arguments = valid_json(call.arguments)
        if arguments is None:
            return False
        call_id = new_call_id(self._notation.id_chars)
        self._delta.calls.append(ToolCall(self.num_calls, call_id, call.name, arguments))
        self.num_calls += 1
        self._is_doubtful, self._opening, self._unsure = False, "", ""
        return True

    @property
    def _goes_by_shape(self) -> bool:
        """Whether no mark precedes the call, so that only its form tells it from text."""
        return self._notation.starts_with_brace and not self._opening

    def _accepts(self, name: str) -> bool:
        return not self._goes_by_shape or name in self._names

    def _leave(self, num_chars: int) -> None:
        """Consume characters."""
        if self._is_doubtful:
            self._unsure += self._buffer[:num_chars]
        self._buffer = self._buffer[num_chars:]

    def _give_up(self) -> None:
        """Treat the mark as text, because no call followed, and parse what followed again."""
        self._delta.content += self._opening
        self._buffer = self._unsure + self._buffer
        self._opening = self._unsure = ""
        self._call, self._in_list = None, False
        self._state = _State.TEXT


def valid_json(text: str) -> str | None:
    """The text if it is JSON, with unescaped line breaks in strings escaped; otherwise None."""
    try:
        json.loads(text)
    except ValueError:
        try:
            return json.dumps(json.loads(text, strict=False), ensure_ascii=False)
        except ValueError:
            return None
    except RecursionError:
        return None
    return text


def settled(text: str, mark: str) -> int:
    """Number of characters before what may become white space and `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return len(text[:-length].rstrip())
    return len(text.rstrip())


def cut_at_mark(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Text before the first of `marks`; the white space and the mark; what follows.

    Without a mark: what can be shown already, "", and what may become white space and a mark.
    """
    found = [(index, mark) for mark in marks if (index := text.find(mark)) >= 0]
    if not found:
        end = min((settled(text, mark) for mark in marks), default=len(text))
        return text[:end], "", text[end:]
    index, mark = min(found)
    begin, end = len(text[:index].rstrip()), index + len(mark)
    return text[:begin], text[begin:end], text[end:]


def new_call_id(num_chars: int = 0) -> str:
    """A new call id. Mistral's templates require exactly nine letters or digits."""
    return (
        secrets.token_hex(num_chars)[:num_chars] if num_chars else f"call_{secrets.token_hex(12)}"
    )
