"""Finds where an object or a list ends in a text that grows."""

from __future__ import annotations

import re

_CLOSES = frozenset("}])")
_IN_QUOTES = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*+", re.DOTALL) for quote in "\"'"}
_SPACE = re.compile(r"[ \t\r\n]*+")
_JSON = re.compile(r'["{}\[\]]')
_PYTHON = re.compile(r"[\"'(){}\[\]]")


class BracketScanner:
    """Looks at each character once. Brackets within strings do not count."""

    def __init__(self, begin: int, *, is_python: bool = False, forgives: bool = False) -> None:
        """
        Args:
            begin: offset of the opening bracket.
            is_python: the text is Python instead of JSON.
            forgives: the last of several closing brackets may be missing, as models forget it.
        """
        self._at = begin
        self._brackets = _PYTHON if is_python else _JSON
        self._forgives = forgives
        self._quote = ""
        """The quotation mark of the string at `_at`; "" outside of strings."""
        self.depth = 0
        """Brackets that are open."""
        self._is_value_over = False
        """Whether the last bracket closed a value, after which a bracket may be missing."""

    def find_end(self, text: str) -> int | None:
        """Offset after the closing bracket; None if it has not arrived yet. If it may be missing,
        the end is also where something else follows an inner bracket; `depth` is 1 then.

        Args:
            text: all that has arrived; begins with the text of the previous call.
        """
        while self._at < len(text):
            if self._quote:
                inside = _IN_QUOTES[self._quote].match(text, self._at)
                assert inside is not None, "the pattern also matches an empty string"
                self._at = inside.end()
                if not text.startswith(self._quote, self._at):
                    return None
                self._at += 1
                self._quote = ""
            elif self._is_value_over:
                space = _SPACE.match(text, self._at)
                assert space is not None, "the pattern also matches an empty string"
                if space.end() == len(text):
                    return None
                if text[space.end()] not in "}],":
                    return self._at
                self._is_value_over = False
            elif self._next_bracket(text):
                return self._at
        return None

    def _next_bracket(self, text: str) -> bool:
        """Move past the next bracket or quotation mark; True if it closes the first bracket."""
        mark = self._brackets.search(text, self._at)
        self._at = len(text) if mark is None else mark.end()
        if mark is None:
            return False
        if mark[0] in _IN_QUOTES:
            self._quote = mark[0]
            return False
        self.depth += -1 if mark[0] in _CLOSES else 1
        self._is_value_over = self._forgives and self.depth == 1 and mark[0] in _CLOSES
        return self.depth == 0
