"""Finds calls that a model writes as JSON objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from dataclasses import dataclass

from loraplex_services.gateway.text.chat_style import ToolFormat
from loraplex_services.gateway.tools.brackets import BracketScanner
from loraplex_services.gateway.tools.reader import MAX_SPACE_CHARS, CallReader, State, valid_json

_NAMED_CALL = re.compile(r"\s*([\w.-]{1,128})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_MAX_HEAD_CHARS = 256
_SPACE = " \t\r\n"
_KEY = re.compile(r'\s*[{,]\s*("(?:[^"\\]|\\.)*+")\s*:\s*', re.DOTALL)
_BEGIN = re.compile(r'\{\s*"([^"\\]*)"\s*:\s*(?:"([^"\\]*)")?')
"""The first key of an object, and its value if that is a text."""
_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_DECODER = json.JSONDecoder(strict=False)


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
"""The notation of required calls under a grammar if the base has none of its own."""


class JsonReader(CallReader):
    """Reads objects, or lists of them. An object that names no function is text."""

    def __init__(self, notation: Notation, names: Set[str]) -> None:
        """`names`: the functions offered; answers that are calls by their shape alone must name
        one of them."""
        super().__init__(notation.opens, id_chars=notation.id_chars)
        self._notation = notation
        self._names = names
        self._may_begin_with_call = notation.starts_with_brace
        if not notation.opens:
            self._state = State.CALL
        self._in_list = False
        self._name = ""
        """The function of a call that is `name{arguments}`."""
        self._scanner: BracketScanner | None = None
        """Looks for the end of the object at `_at`; None before an object."""

    def _read_text(self) -> bool:
        if self._may_begin_with_call:
            shown = self._buffer.lstrip()
            is_near = len(self._buffer) - len(shown) <= MAX_SPACE_CHARS
            self._may_begin_with_call = is_near and not shown
            if is_near and shown.startswith("{"):
                self._state = State.CALL
                return True
        return super()._read_text()

    def _read_call(self) -> bool:
        if self._scanner is None:
            return self._begin()
        only_names = self._names if self._goes_by_shape else None
        if only_names is not None and self._begins_otherwise():
            self._give_up()
            return True
        end = self._scanner.find_end(self._buffer)
        if end is None:
            return False
        raw, is_forgiven = self._buffer[self._at : end], self._scanner.depth > 0
        if self._name:
            arguments = valid_json(raw)
            call = None if arguments is None else (self._name, arguments)
        else:
            call = _read_object(raw + "}" * is_forgiven, only_names, needs_arguments=is_forgiven)
        if call is None:
            self._give_up()
            return True
        self._emit(end, call)
        if self._name:
            self._state = State.TEXT
        self._scanner, self._name = None, ""
        return True

    def _begin(self) -> bool:
        """Find the object after the mark, and the bracket of a list if there is one."""
        rest = self._rest()
        self._at = len(self._buffer) - len(rest)
        if not rest:
            return False
        if rest[0] == "{":
            self._scanner = BracketScanner(self._at, forgives=True)
        elif rest[0] == "[" and not self._in_list:
            self._in_list = True
            self._at += 1
        elif self._notation.names_come_first and not self._in_list:
            return self._begin_named(rest)
        else:
            self._give_up()
        return True

    def _begin_named(self, rest: str) -> bool:
        head, brace, _ = rest.partition("{")
        match = _NAMED_CALL.fullmatch(head)
        if brace and match:
            self._name = match[1]
            self._at += len(head)
            self._scanner = BracketScanner(self._at)
        elif brace or len(head) > _MAX_HEAD_CHARS:
            self._give_up()
        else:
            return False
        return True

    def _begins_otherwise(self) -> bool:
        """Whether the first key of the object shows that it is no call, so that it need not be held
        back."""
        begin = _BEGIN.match(self._buffer, self._at)
        if begin is None:
            return False
        key, text = begin.groups()
        is_other_name = key == "name" and text is not None and text not in self._names
        return key not in _CALL_KEYS or is_other_name

    def _read_after_call(self) -> bool:
        self._buffer = rest = self._rest()
        closes = self._notation.closes
        if not rest or (len(rest) < len(closes) and closes.startswith(rest)):
            return False
        if rest[0] == "{":
            self._state = State.CALL
        elif rest[0] == "]" and self._in_list:
            self._buffer, self._in_list = rest[1:], False
            self._state = State.AFTER_CALL if closes else State.TEXT
        else:
            self._buffer = rest.removeprefix(closes)
            self._state = State.TEXT
        return True

    def _rest(self) -> str:
        """The text after the white space and the separators at `_at`."""
        return self._buffer[self._at :].lstrip(_SPACE + self._notation.separators)

    def _give_up(self) -> None:
        self._scanner, self._name, self._in_list = None, "", False
        super()._give_up()

    @property
    def _goes_by_shape(self) -> bool:
        """Whether no mark precedes the call, so that only its form tells it from text."""
        return self._notation.starts_with_brace and not self._mark


def _read_object(
    text: str, names: Set[str] | None, *, needs_arguments: bool
) -> tuple[str, str] | None:
    """Name and arguments of `{"name": ..., "arguments": {...}}` in any order of keys; None if it is
    no call.

    Arguments are kept as the model wrote them; those written as a text of JSON are decoded.

    Args:
        names: a call names one of them, and no keys but those of calls come before its name; None =
            any name, and any keys.
    """
    try:
        raw = _raw_members(text)
        name = json.loads(raw["name"])
        if needs_arguments and raw.keys().isdisjoint(_ARGUMENTS):
            return None
        arguments = next((raw[key] for key in _ARGUMENTS if key in raw), "{}")
        if arguments.startswith('"'):
            arguments = _DECODER.decode(arguments) or "{}"
    except (KeyError, ValueError, RecursionError):
        return None
    if not isinstance(name, str) or not name:
        return None
    before = list(raw)[: list(raw).index("name")]
    if names is not None and not (name in names and _CALL_KEYS.issuperset(before)):
        return None
    valid = valid_json(arguments)
    return None if valid is None else (name, valid)


def _raw_members(text: str) -> dict[str, str]:
    """The values of a JSON object by key, as they are written. Raises: ValueError."""
    found: dict[str, str] = {}
    at = 0
    while (key := _KEY.match(text, at)) is not None:
        _, at = _DECODER.raw_decode(text, key.end())
        found[json.loads(key[1])] = text[key.end() : at]
    if text[at:].strip() != "}":
        raise ValueError("no object")
    return found
