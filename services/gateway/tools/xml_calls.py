"""Finds calls that a model writes as tags, as Qwen3-Coder does.

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

A model may omit the outer tags. A call is emitted when its function is closed.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from typing import Any

from loraplex_services.gateway.tools.reader import Delta, ToolCall, cut_at_mark, new_call_id
from loraplex_services.gateway.tools.schema_values import json_value

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"\s*([\w.-]{1,128})\s*>")
_MAX_NAME_CHARS = 160


class _State(enum.Enum):
    TEXT = enum.auto()
    OPENED = enum.auto()
    """After the outer mark."""
    NAME = enum.auto()
    """Behind `<function=`."""
    BODY = enum.auto()
    KEY = enum.auto()
    """Behind `<parameter=`."""
    VALUE = enum.auto()
    CLOSED = enum.auto()
    """After a call."""


class XmlReader:
    """Splits one answer into text and calls; marks without a call remain text."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: JSON Schema of the arguments of each function offered."""
        self._schemas = schemas
        self._state = _State.TEXT
        self._buffer = ""
        self._doubtful = ""
        """The start of a call, which is text unless the call is completed."""
        self._is_marked = False
        self._name = self._key = ""
        self._arguments: list[str] = []
        """Members of a JSON object."""
        self._delta = Delta()
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        """Parse the next part of the text. Returns what it adds to the answer."""
        self._buffer += text
        steps = {
            _State.TEXT: self._text,
            _State.OPENED: self._opened,
            _State.NAME: self._named,
            _State.BODY: self._body,
            _State.KEY: self._keyed,
            _State.VALUE: self._value,
            _State.CLOSED: self._closed,
        }
        while self._buffer and steps[self._state]():
            pass
        return self._taken()

    def finish(self) -> Delta:
        """End the text. Returns what was held back; an incomplete call becomes text."""
        if self._state is not _State.CLOSED:
            self._delta.content += self._doubtful + self._buffer
        return self._taken()

    def _taken(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def _text(self) -> bool:
        shown, opening, self._buffer = cut_at_mark(self._buffer, (_OPENS, _FUNCTION))
        self._delta.content += shown
        if not opening:
            return False
        self._doubtful = opening
        self._is_marked = opening.endswith(_OPENS)
        self._state = _State.OPENED if self._is_marked else _State.NAME
        return True

    def _opened(self) -> bool:
        self._skip_space()
        if self._buffer.startswith(_FUNCTION):
            self._leave(len(_FUNCTION))
            self._state = _State.NAME
        elif _FUNCTION.startswith(self._buffer):
            return False
        else:
            self._give_up()
        return True

    def _named(self) -> bool:
        """A call without the outer mark must name a function that is offered."""
        match = _NAME.match(self._buffer)
        if match and (self._is_marked or match[1] in self._schemas):
            self._leave(match.end())
            self._name, self._arguments, self._state = match[1], [], _State.BODY
        elif match or ">" in self._buffer or len(self._buffer) > _MAX_NAME_CHARS:
            self._give_up()
        else:
            return False
        return True

    def _body(self) -> bool:
        """Read arguments; other text between them is ignored."""
        begin = self._buffer.find("<")
        self._leave(len(self._buffer) if begin < 0 else begin)
        if self._buffer.startswith(_PARAMETER):
            self._leave(len(_PARAMETER))
            self._state = _State.KEY
        elif self._buffer.startswith(_END_FUNCTION):
            self._leave(len(_END_FUNCTION))
            self._complete()
        elif _PARAMETER.startswith(self._buffer) or _END_FUNCTION.startswith(self._buffer):
            return False
        else:
            self._leave(1)
        return True

    def _keyed(self) -> bool:
        key, mark, _ = self._buffer.partition(">")
        if not mark:
            return False
        self._leave(len(key) + len(mark))
        self._key, self._state = key.strip(), _State.VALUE
        return True

    def _value(self) -> bool:
        """One line break on either side belongs to the tags."""
        text, mark, _ = self._buffer.partition(_END_PARAMETER)
        if not mark:
            return False
        self._leave(len(text) + len(mark))
        value = text.removeprefix("\n").removesuffix("\n")
        json_text = json_value(value, self._key, self._schemas.get(self._name, {}))
        self._arguments.append(f"{json.dumps(self._key, ensure_ascii=False)}: {json_text}")
        self._state = _State.BODY
        return True

    def _complete(self) -> None:
        arguments = "{" + ", ".join(self._arguments) + "}"
        self._delta.calls.append(ToolCall(self.num_calls, new_call_id(), self._name, arguments))
        self.num_calls += 1
        self._doubtful, self._state = "", _State.CLOSED

    def _closed(self) -> bool:
        """Another call may follow inside the same outer mark."""
        shown = self._buffer.lstrip()
        if self._is_marked and shown.startswith(_CLOSES):
            self._buffer, self._state = shown[len(_CLOSES) :], _State.TEXT
        elif self._is_marked and _CLOSES.startswith(shown):
            return False
        else:
            self._state = _State.TEXT
        return True

    def _skip_space(self) -> None:
        self._leave(len(self._buffer) - len(self._buffer.lstrip()))

    def _leave(self, num_chars: int) -> None:
        self._doubtful += self._buffer[:num_chars]
        self._buffer = self._buffer[num_chars:]

    def _give_up(self) -> None:
        """Treat the mark as text, because no call followed, and parse what followed again."""
        mark = _OPENS if self._is_marked else _FUNCTION
        text, _, rest = self._doubtful.partition(mark)
        self._delta.content += text + mark
        self._buffer, self._doubtful = rest + self._buffer, ""
        self._state = _State.TEXT
