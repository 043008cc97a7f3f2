"""Reads calls as Gemma 4 writes them, between `<|tool_call>` and `<tool_call|>`.

    call:weather{city:<|"|>Rome<|"|>,days:2,where:{inside:false}}

Keys are not quoted. Strings are between marks of their own, and nothing in them is escaped.
Source: the model's chat template, macro `format_argument`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from loraplex_services.gateway.tools.schema_values import value_of

QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*call:([\w.-]{1,128})\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]{1,128})\s*:")
_BARE = re.compile(r"[^,}\]]*")
_SPACE = re.compile(r"\s*")
_DEEPEST = 64


def gemma_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of the text between the marks; None if it is no call."""
    head = _HEAD.match(body)
    if head is None:
        return None
    values = _Values(body, head.end())
    try:
        arguments = values.read()
    except ValueError:
        return None
    if body[values.at :].strip():
        return None
    return head[1], json.dumps(arguments, ensure_ascii=False)


class _Values:
    """Reads values from a text. Methods raise ValueError if there is none."""

    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at
        """Offset of the next character."""

    def read(self, depth: int = 0) -> Any:
        """One value. Mutates: at."""
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        self._skip(_SPACE)
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._list(depth)
        if self._takes(QUOTE):
            return self._up_to_quote()
        if self._text.startswith('"', self.at):
            value, self.at = json.JSONDecoder(strict=False).raw_decode(self._text, self.at)
            return value
        word = self._skip(_BARE).strip()
        try:
            return value_of(word)
        except ValueError:
            if not word:
                raise
            return word

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._ends("}", found):
            key = self._key()
            found[key] = self.read(depth + 1)
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._ends("]", found):
            found.append(self.read(depth + 1))
        return found

    def _ends(self, closes: str, found: dict[str, Any] | list[Any]) -> bool:
        """Whether the closing character follows, otherwise the comma before the next item."""
        self._skip(_SPACE)
        if self._takes(closes):
            return True
        if found and not self._takes(","):
            raise ValueError("a comma is missing")
        return False

    def _key(self) -> str:
        self._skip(_SPACE)
        if self._takes(QUOTE):
            key = self._up_to_quote()
            self._skip(_SPACE)
            if not self._takes(":"):
                raise ValueError("a key has no value")
            return key
        match = _KEY.match(self._text, self.at)
        if match is None:
            raise ValueError("a key is missing")
        self.at = match.end()
        return match[1].strip('"')

    def _up_to_quote(self) -> str:
        end = self._text.find(QUOTE, self.at)
        if end < 0:
            raise ValueError("a string has no end")
        text, self.at = self._text[self.at : end], end + len(QUOTE)
        return text

    def _takes(self, text: str) -> bool:
        if not self._text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.at)
        assert match is not None, "the pattern matches nothing as well"
        self.at = match.end()
        return match[0]
