"""Finds calls that a model writes as Python: `[weather(city="Rome"), now()]` as the whole answer.

Small Llama 3.2 models and Gemma 3 are prompted to do so. The list is parsed and never executed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Set
from typing import Any

from loraplex_services.gateway.tools.reader import Delta, ToolCall, new_call_id

MAX_CHARS = 1 << 16
_BEGIN = re.compile(r"\[\s*(?:[\w.-]*|[\w.-]+\s*\(.*)", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_OPENS, _CLOSES = "([{", ")]}"


class PythonReader:
    """Splits one answer into calls or text. Calls are emitted when their list is complete."""

    def __init__(self, names: Set[str]) -> None:
        """`names`: the functions offered; an answer that calls another is text."""
        self._names = names
        self._buffer = ""
        self._num_read = self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._is_text = False
        self.num_calls = 0

    def feed(self, text: str) -> Delta:
        """Parse the next part of the text. Returns what it adds to the answer."""
        if self._is_text:
            return Delta(content=text)
        self._buffer += text
        shown = self._buffer.lstrip()
        if not shown:
            return Delta()
        if not _BEGIN.fullmatch(shown) or len(shown) > MAX_CHARS:
            return self._let_go()
        while self._num_read < len(self._buffer):
            self._read(self._buffer[self._num_read])
            self._num_read += 1
            if not self._depth and not self._buffer[: self._num_read].isspace():
                return self._called()
        return Delta()

    def finish(self) -> Delta:
        """End the text. An incomplete list becomes text."""
        return self._let_go()

    def _read(self, char: str) -> None:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in _OPENS:
            self._depth += 1
        elif char in _CLOSES:
            self._depth -= 1

    def _called(self) -> Delta:
        """The output for a complete list: its calls, or text if it calls a function that is not
        offered."""
        calls = _parsed(self._buffer[: self._num_read].strip())
        if not calls or any(name not in self._names for name, _ in calls):
            return self._let_go()
        self._buffer = self._buffer[self._num_read :]
        delta = self._let_go()
        for name, arguments in calls:
            delta.calls.append(ToolCall(self.num_calls, new_call_id(), name, arguments))
            self.num_calls += 1
        return delta

    def _let_go(self) -> Delta:
        text, self._buffer, self._is_text = self._buffer, "", True
        return Delta(content=text)


def _parsed(text: str) -> list[tuple[str, str]]:
    """Names and arguments as JSON; empty if the text is not a list of calls."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which would show what the model wrote
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    """Raises: ValueError unless it is a call with named arguments."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without a name")
        arguments[keyword.arg] = _value(keyword.value)
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr | None) -> Any:
    """Raises: ValueError for values that JSON lacks."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_value(k)): _value(v) for k, v in zip(keys, values, strict=True)}
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
    raise ValueError("not a literal")
