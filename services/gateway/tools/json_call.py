"""Parses one call in JSON incrementally: the name of its function, then its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Fragment:
    """Raw text of the value of a top-level key."""

    key: str
    text: str
    is_last: bool
    """Whether the value is complete with this fragment."""


class ObjectReader:
    """Reads one JSON object from its opening brace: the top-level keys and their raw values."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None
        """The key whose value is being read."""
        self._text: list[str] = []
        """Characters of a key, or of a value, that were not returned yet."""
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
        """Read the next character. Returns a fragment if a value grew."""
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
        """Add a character to a key or a value. Mutates: text."""
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


_ARGUMENTS = ("arguments", "parameters")
CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}` in any order of keys.

    Arguments are kept as the model wrote them; those written as a text of JSON are decoded.
    """

    def __init__(self, accepts: Callable[[str], bool], *, only_call_keys: bool) -> None:
        """
        Args:
            accepts: says whether a function of that name may be called.
            only_call_keys: an object with other keys is no call.
        """
        self._accepts = accepts
        self._only_call_keys = only_call_keys
        self._object = ObjectReader()
        self._raw_name = ""
        self._is_text: bool | None = None
        """True if the arguments are a string of JSON; None before their first character."""
        self._text = ""
        self._grown: list[str] = []
        self._has_arguments = False
        self.name = ""
        """Name of the function; "" until it is known."""
        self.is_done = self.is_broken = False

    def push(self, char: str) -> bool:
        """Add the next character, starting with the opening brace. Returns False if the call ended
        before it."""
        if self._has_arguments and self._object.lacks_brace_before(char):
            self._end()
            return False
        fragment = self._object.push(char)
        if fragment is not None:
            self._take(fragment)
        if self._object.is_done and not self.is_broken:
            self._end()
        return True

    @property
    def arguments(self) -> str:
        """The arguments so far, as JSON text."""
        return "".join(self._grown)

    def _take(self, fragment: Fragment) -> None:
        if fragment.key == "name" and not self.name:
            self._raw_name += fragment.text
            if fragment.is_last:
                self._take_name()
        elif fragment.key in _ARGUMENTS:
            self._take_arguments(fragment)
        elif self._only_call_keys and fragment.key not in CALL_KEYS:
            self.is_broken = not self.name

    def _take_name(self) -> None:
        try:
            name = json.loads(self._raw_name)
        except ValueError:
            name = None
        if isinstance(name, str) and name and self._accepts(name):
            self.name = name
        else:
            self.is_broken = True

    def _take_arguments(self, fragment: Fragment) -> None:
        if self._is_text is None:
            self._is_text = fragment.text.startswith('"')
        if not self._is_text:
            self._has_arguments = True
            self._grown.append(fragment.text)
            return
        self._text += fragment.text
        if fragment.is_last:
            self._has_arguments = self._text != '""'
            self._grown.append(_decoded(self._text))

    def _end(self) -> None:
        self.is_done, self.is_broken = True, not self.name
        if not self._has_arguments:
            self._grown.append("{}")


class BareCall:
    """Reads `{...}` as the arguments of a function whose name was read before."""

    is_broken = False

    def __init__(self, name: str) -> None:
        self._object = ObjectReader()
        self._grown: list[str] = []
        self.name = name

    @property
    def is_done(self) -> bool:
        """Whether the closing brace was read."""
        return self._object.is_done

    def push(self, char: str) -> bool:
        """Add the next character, starting with the opening brace; the call consumes all of
        them."""
        self._object.push(char)
        self._grown.append(char)
        return True

    @property
    def arguments(self) -> str:
        """The arguments so far, as JSON text."""
        return "".join(self._grown)


def _decoded(raw: str) -> str:
    try:
        return str(json.loads(raw))
    except ValueError:
        return raw
