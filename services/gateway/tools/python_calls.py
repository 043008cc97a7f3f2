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

from loraplex_services.gateway.tools.brackets import BracketScanner
from loraplex_services.gateway.tools.reader import MAX_SPACE_CHARS, CallReader, State

MAX_CHARS = 1 << 16
_BEGIN = re.compile(r"\[\s*+(?:[\w.-]++\s*+(?:\(.*)?)?", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class PythonReader(CallReader):
    """Reads an answer that begins with a list of calls."""

    def __init__(self, names: Set[str]) -> None:
        """`names`: the functions offered; an answer that calls another is text."""
        super().__init__(())
        self._state = State.CALL
        self._names = names
        self._scanner: BracketScanner | None = None

    def _read_call(self) -> bool:
        shown = self._buffer.lstrip()
        if len(self._buffer) - len(shown) > MAX_SPACE_CHARS:
            self._give_up()
            return True
        if not shown:
            return False
        if not _BEGIN.fullmatch(shown) or len(shown) > MAX_CHARS:
            self._give_up()
            return True
        if self._scanner is None:
            self._scanner = BracketScanner(len(self._buffer) - len(shown), is_python=True)
        if (end := self._scanner.find_end(self._buffer)) is None:
            return False
        calls = _parsed(self._buffer[:end].strip())
        if calls and all(name in self._names for name, _ in calls):
            self._emit(end, *calls)
        else:
            self._give_up()
        return True


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
