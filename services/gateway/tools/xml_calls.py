"""Finds calls that a model writes as tags, as Qwen3-Coder does.

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

A model may omit the outer tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from loraplex_services.gateway.tools.reader import MAX_SPACE_CHARS, CallReader, State
from loraplex_services.gateway.tools.schema_values import json_value

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"\s*([\w.-]{1,128})\s*>")
_MAX_NAME_CHARS = 160
_TAG = re.compile(f"{_PARAMETER}|{_END_FUNCTION}")


class XmlReader(CallReader):
    """Reads a call when its function is closed."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: JSON Schema of the arguments of each function offered."""
        super().__init__((_OPENS, _FUNCTION))
        self._schemas = schemas
        self._is_marked = False
        """Whether the call has the outer tags."""
        self._name = ""
        """The function; "" before it was read."""
        self._arguments: list[str] = []
        """Members of a JSON object."""
        self._num_searched = 0
        """Number of characters of the buffer that contain no end of the argument at `_at`."""

    def _read_call(self) -> bool:
        return self._read_body() if self._name else self._read_name()

    def _read_name(self) -> bool:
        """Read up to the function's name. A call without the outer tags must name a function that
        is offered."""
        self._is_marked = self._mark.endswith(_OPENS)
        rest = self._buffer[len(self._mark) :]
        if self._is_marked:
            num_chars, rest = len(rest), rest.lstrip()
            is_near = num_chars - len(rest) <= MAX_SPACE_CHARS
            if not (is_near and rest.startswith(_FUNCTION)):
                if is_near and _FUNCTION.startswith(rest):
                    return False
                self._give_up()
                return True
            rest = rest.removeprefix(_FUNCTION)
        match = _NAME.match(rest)
        if match and (self._is_marked or match[1] in self._schemas):
            self._name, self._arguments = match[1], []
            self._at = len(self._buffer) - len(rest) + match.end()
        elif match or ">" in rest or len(rest) > _MAX_NAME_CHARS:
            self._give_up()
        else:
            return False
        return True

    def _read_body(self) -> bool:
        """Read an argument, or the end of the call; other text between them is ignored."""
        tag = _TAG.search(self._buffer, self._at)
        if tag is None:
            self._at = max(self._at, len(self._buffer) - len(_PARAMETER) + 1)
            return False
        if tag[0] == _END_FUNCTION:
            name, self._name = self._name, ""
            self._emit(tag.end(), (name, "{" + ", ".join(self._arguments) + "}"))
            return True
        self._at = tag.start()
        key_end = self._buffer.find(">", tag.end())
        if key_end < 0:
            return False
        begin = key_end + 1
        end = self._buffer.find(_END_PARAMETER, max(begin, self._num_searched))
        if end < 0:
            self._num_searched = len(self._buffer) - len(_END_PARAMETER) + 1
            return False
        self._add_argument(self._buffer[tag.end() : key_end].strip(), self._buffer[begin:end])
        self._at, self._num_searched = end + len(_END_PARAMETER), 0
        return True

    def _add_argument(self, key: str, text: str) -> None:
        """One line break on either side of a value belongs to the tags."""
        value = text.removeprefix("\n").removesuffix("\n")
        json_text = json_value(value, key, self._schemas.get(self._name, {}))
        self._arguments.append(f"{json.dumps(key, ensure_ascii=False)}: {json_text}")

    def _read_after_call(self) -> bool:
        """Another call may follow inside the same outer tags."""
        shown = self._buffer.lstrip()
        may_close = self._is_marked and len(self._buffer) - len(shown) <= MAX_SPACE_CHARS
        if may_close and shown.startswith(_CLOSES):
            self._buffer = shown.removeprefix(_CLOSES)
        elif may_close and _CLOSES.startswith(shown):
            return False
        self._state = State.TEXT
        return True
