"""Parses the accepted subset of Python's regular expression syntax into a tree for `regex`.

What is accepted means exactly what it means to `re`. Refused by name: back-references, inline
flags, comments, atomic and conditional groups, possessive repeats, escapes of letters other than
`dDwWsSbAZ`, and repeats of something that can match nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from loraplex.adapter_format.regex import (
    Anchor,
    BadPattern,
    Branches,
    Char,
    LookAround,
    Node,
    Repeat,
    Sequence,
)

MAX_PATTERN_CHARS = 2048
MAX_GROUP_DEPTH = 32
MAX_COUNT = 1000

_COUNTS = re.compile(r"\{(\d*)(,?)(\d*)\}", re.ASCII)
_GROUP_NAME = re.compile(r"P<([A-Za-z_][A-Za-z0-9_]*)>")
_LOOKS = {"?=": (True, False), "?!": (True, True), "?<=": (False, False), "?<!": (False, True)}


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _at_boundary(chars: str, position: int) -> bool:
    before = position > 0 and _is_word(chars[position - 1])
    after = position < len(chars) and _is_word(chars[position])
    return before != after


def _at_line_end(chars: str, position: int) -> bool:
    return position == len(chars) or (position == len(chars) - 1 and chars[position] == "\n")


_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "D": lambda char: not char.isdecimal(),
    "w": _is_word,
    "W": lambda char: not _is_word(char),
    "s": str.isspace,
    "S": lambda char: not char.isspace(),
}
_START = Anchor(lambda chars, position: position == 0)
_PLACES = {
    "A": _START,
    "Z": Anchor(lambda chars, position: position == len(chars)),
    "b": Anchor(_at_boundary),
}


def parse(pattern: str) -> Node:
    """Read a pattern.

    Raises:
        BadPattern: it is invalid, too long, or uses what is not accepted.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadPattern(f"has {len(pattern)} characters, at most {MAX_PATTERN_CHARS} are accepted")
    parser = _Parser(pattern)
    node = parser.choice()
    if parser.position < len(pattern):
        raise parser.error("has an unbalanced ')'")
    return node


@dataclass(slots=True)
class _Parser:
    """A position in a pattern; every method reads one construct and moves on."""

    pattern: str
    position: int = 0
    depth: int = 0
    names: set[str] = field(default_factory=set)

    def error(self, problem: str) -> BadPattern:
        return BadPattern(f"{problem} at character {self.position}")

    def peek(self) -> str:
        return self.pattern[self.position : self.position + 1]

    def take(self) -> str:
        char = self.peek()
        if not char:
            raise self.error("ends too early")
        self.position += 1
        return char

    def skip(self, text: str) -> bool:
        if not self.pattern.startswith(text, self.position):
            return False
        self.position += len(text)
        return True

    def choice(self) -> Node:
        branches = [self.sequence()]
        while self.skip("|"):
            branches.append(self.sequence())
        return branches[0] if len(branches) == 1 else Branches(tuple(branches))

    def sequence(self) -> Node:
        parts = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeat(self.atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def repeat(self, part: Node) -> Node:
        counts = self.counts()
        if counts is None:
            return part
        low, high = counts
        if isinstance(part, Anchor):
            raise self.error("repeats a position")
        if part.min_width == 0 and high != 1:
            raise self.error("repeats something that can match nothing")
        self.skip("?")
        if self.peek() and self.peek() in "*+?{":
            raise self.error("repeats a repetition or is possessive, which is not accepted")
        return Repeat(part, low, high)

    def counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.skip(sign):
                return counts
        if self.peek() != "{":
            return None
        match = _COUNTS.match(self.pattern, self.position)
        if match is None or match[0] == "{}":
            raise self.error("has a '{' that begins no count; write \\{")
        self.position = match.end()
        low = int(match[1] or 0)
        high = (int(match[3]) if match[3] else None) if match[2] else low
        if max(low, high or 0) > MAX_COUNT or (high is not None and low > high):
            raise self.error(f"has a bad count; counts rise to at most {MAX_COUNT}")
        return low, high

    def atom(self) -> Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return self.char_class()
        if char == "\\":
            return self.escape()
        if char == ".":
            return Char(_not_newline)
        if char == "^":
            return _START
        if char == "$":
            return Anchor(_at_line_end)
        if char in "*+?{":
            raise self.error("has nothing to repeat")
        return _literal(char)

    def escape(self) -> Node:
        char = self.take()
        if char in _PLACES:
            return _PLACES[char]
        if char in _CLASSES:
            return Char(_CLASSES[char])
        return _literal(self.escaped(char))

    def escaped(self, char: str) -> str:
        if char.isascii() and char.isalnum():
            raise self.error(f"uses \\{char}, which is not accepted")
        return char

    def group(self) -> Node:
        self.depth += 1
        if self.depth > MAX_GROUP_DEPTH:
            raise self.error(f"nests groups deeper than {MAX_GROUP_DEPTH}")
        look = self.group_kind()
        body = self.choice()
        if not self.skip(")"):
            raise self.error("has a '(' that is not closed")
        self.depth -= 1
        if look is None:
            return Sequence((body,))
        ahead, negative = look
        if not ahead and body.min_width != body.max_width:
            raise self.error("looks back over a varying width")
        return LookAround(body, ahead, negative)

    def group_kind(self) -> tuple[bool, bool] | None:
        """Read what follows the '(': (ahead, negative) of a look-around, None of a plain group."""
        if self.peek() != "?" or self.skip("?:"):
            return None
        for sign, look in _LOOKS.items():
            if self.skip(sign):
                return look
        match = _GROUP_NAME.match(self.pattern, self.position + 1)
        if match is None or match[1] in self.names:
            raise self.error("uses a kind of group that is not accepted")
        self.names.add(match[1])
        self.position = match.end()
        return None

    def char_class(self) -> Node:
        negated = self.skip("^")
        tests: list[Callable[[str], bool]] = []
        while not tests or self.peek() != "]":
            tests.append(self.class_item())
        self.position += 1
        return Char(_negate(tests) if negated else _any(tests))

    def class_item(self) -> Callable[[str], bool]:
        low = self.class_char()
        if self.peek() != "-" or self.pattern[self.position + 1 : self.position + 2] == "]":
            return low if callable(low) else _equals(low)
        self.position += 1
        high = self.class_char()
        if callable(low) or callable(high) or low > high:
            raise self.error("has a bad range in [...]")
        return _between(low, high)

    def class_char(self) -> str | Callable[[str], bool]:
        char = self.take()
        if char == "\\":
            char = self.take()
            return _CLASSES[char] if char in _CLASSES else self.escaped(char)
        if char == "[" or (char in "-&|~" and self.peek() == char):
            raise self.error(f"has {char!r} in [...], which is ambiguous; escape it")
        return char


def _not_newline(char: str) -> bool:
    return char != "\n"


@functools.lru_cache(maxsize=256)
def _literal(char: str) -> Char:
    """One node per character, so that a text looks for it once."""
    return Char(_equals(char))


def _equals(wanted: str) -> Callable[[str], bool]:
    return lambda char: char == wanted


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda char: low <= char <= high


def _any(tests: list[Callable[[str], bool]]) -> Callable[[str], bool]:
    return lambda char: any(test(char) for test in tests)


def _negate(tests: list[Callable[[str], bool]]) -> Callable[[str], bool]:
    return lambda char: not any(test(char) for test in tests)
