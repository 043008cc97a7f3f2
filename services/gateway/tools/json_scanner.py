"""Reads one JSON object as it grows: which key is at its top level, and the value's raw text."""

from __future__ import annotations

import json
from dataclasses import dataclass

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Raw text of the value of a top-level key."""

    key: str
    text: str
    is_last: bool
    """The value is complete with this."""


class ObjectReader:
    """Takes characters from the opening brace on; says when the object is complete."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None
        """The key whose value is being read."""
        self._text: list[str] = []
        """Characters of a key, or of a value that were not handed out yet."""
        self._is_value = False
        self._has_value = False
        self._is_value_over = False
        self.is_done = False

    def lacks_brace_before(self, char: str) -> bool:
        """Whether a value in brackets is complete and `char` cannot follow it.

        Models forget the last of several closing braces.
        """
        return self._is_value_over and char not in "}]," + _SPACE

    def push(self, char: str) -> Fragment | None:
        """The next character. Returns a fragment where a value grew; never two for one."""
        assert not self.is_done, "the object is complete"
        if self._in_string:
            return self._in_text(char)
        if char == '"':
            self._in_string = True
            return self._take(char)
        if char in "{[":
            self._depth += 1
            return self._take(char) if self._depth > 1 else None
        if char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.is_done = True
                return self._end()
            self._is_value_over = self._depth == 1 and self._is_value
            return self._take(char)
        if self._depth == 1 and char == ",":
            return self._end()
        if self._depth == 1 and char == ":" and not self._is_value:
            self._begin_value()
            return None
        if self._depth == 1 and char in _SPACE:
            return None
        return self._take(char)

    def _in_text(self, char: str) -> Fragment | None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
        return self._take(char)

    def _take(self, char: str) -> Fragment | None:
        """A character that belongs to a key or a value. Mutates: text."""
        if not self._is_value:
            self._text.append(char)
            return None
        self._has_value = True
        return Fragment(self._key or "", char, is_last=False)

    def _begin_value(self) -> None:
        try:
            key = json.loads("".join(self._text))
        except ValueError:
            key = ""
        self._key = key if isinstance(key, str) else ""
        self._text.clear()
        self._is_value, self._has_value = True, False

    def _end(self) -> Fragment | None:
        ended = self._is_value and self._has_value
        fragment = Fragment(self._key or "", "", is_last=True) if ended else None
        self._key, self._is_value, self._is_value_over = None, False, False
        self._text.clear()
        return fragment
