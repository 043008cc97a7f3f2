"""Finds calls that a model writes as pairs of tags, as GLM-4.5 and later do.

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Rome</arg_value>
    </tool_call>

A call is emitted when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from loraplex_services.gateway.tools.reader import Delta, ToolCall, cut_at_mark, new_call_id
from loraplex_services.gateway.tools.schema_values import json_value

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_PAIR = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*"
_PAIRS = re.compile(_PAIR, re.DOTALL)
_NAME = re.compile(r"\s*([\w.-]{1,128})\s*")


class GlmReader:
    """Splits one answer into text and calls; marks without a call remain text."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: JSON Schema of the arguments of each function offered."""
        self._schemas = schemas
        self._buffer = ""
        self._opening = ""
        """The mark of an open call and the white space before it, which are text if no call
        follows."""
        self._num_searched = 0
        """Characters of an open call that hold no closing mark."""
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        """Text that follows."""
        self._buffer += text
        delta = Delta()
        while self._buffer and (self._close(delta) if self._opening else self._open(delta)):
            pass
        return delta

    def finish(self) -> Delta:
        """End the text; an incomplete call was text."""
        text, self._buffer = self._opening + self._buffer, ""
        return Delta(content="" if self.num_calls and text.isspace() else text)

    def _open(self, delta: Delta) -> bool:
        """Text up to the next mark; False without one. Mutates: delta."""
        shown, self._opening, self._buffer = cut_at_mark(self._buffer, (_OPENS,))
        delta.content += shown
        self._num_searched = 0
        return bool(self._opening)

    def _close(self, delta: Delta) -> bool:
        """Read one call up to its closing mark; False if that has not arrived. Mutates: delta."""
        end = self._buffer.find(_CLOSES, self._num_searched)
        if end < 0:
            self._num_searched = max(0, len(self._buffer) - len(_CLOSES) + 1)
            return False
        body, self._buffer = self._buffer[:end], self._buffer[end + len(_CLOSES) :]
        opening, self._opening = self._opening, ""
        name = _NAME.match(body)
        rest = body[name.end() :] if name else body
        if name is None or _PAIRS.sub("", rest):
            delta.content += opening + body + _CLOSES
            return True
        schema = self._schemas.get(name[1], {})
        pairs = [(key.strip(), value) for key, value in _PAIRS.findall(rest)]
        arguments = ", ".join(
            f"{json.dumps(key, ensure_ascii=False)}: {json_value(value, key, schema)}"
            for key, value in pairs
        )
        delta.calls.append(ToolCall(self.num_calls, new_call_id(), name[1], "{" + arguments + "}"))
        self.num_calls += 1
        return True
