"""Matches untrusted regular expressions in bounded time.

Python's `re` backtracks: twenty characters of pattern can keep it busy for years, holding the GIL,
and nothing but a signal to the main thread ends it. RE2 is bounded but has no look-arounds, with
which `target_modules` leave out towers such as `visual`. Here a pattern is a tree (`regex_parser`
builds it) that is matched by sets of positions: a set is an int whose bit p says "a match can be at
position p of the text", `ends` maps a set of starts to all ends, `starts` goes back. A repeat stops
when no new position appears, at the latest after one round per character, and all work is counted
against one `Work`. Only *whether* a text matches is answered, so greedy and lazy repeats mean the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

MAX_WORK = 3_000_000


class BadPattern(Exception):
    """The pattern is invalid, not accepted or too slow; the message says which."""


@dataclass(slots=True)
class Work:
    """The work that matching may still do, in visits of nodes and characters (about 0.2 us
    each)."""

    left: int = MAX_WORK

    def spend(self, visits: int) -> None:
        """Count visits. Raises BadPattern if none are left."""
        self.left -= visits
        if self.left < 0:
            raise BadPattern("takes too long to match; use fewer patterns or fewer repeats in them")


@dataclass(slots=True)
class Text:
    """A text being matched and what is known about it: positions by the id of a node."""

    chars: str
    work: Work
    known: dict[int, int] = field(default_factory=dict)

    @property
    def everywhere(self) -> int:
        """Every position, the end included."""
        return (1 << (len(self.chars) + 1)) - 1


class Node(Protocol):
    """A part of a pattern. Widths are in characters; a `max_width` of None has no bound."""

    @property
    def min_width(self) -> int: ...
    @property
    def max_width(self) -> int | None: ...
    def ends(self, text: Text, starts: int) -> int: ...
    def starts(self, text: Text, ends: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Char:
    """One character for which `test` holds."""

    test: Callable[[str], bool]
    min_width: int = 1
    max_width: int | None = 1

    def ends(self, text: Text, starts: int) -> int:
        return (starts & self._fits(text)) << 1

    def starts(self, text: Text, ends: int) -> int:
        return (ends >> 1) & self._fits(text)

    def closure(self, text: Text, starts: int) -> int:
        """All positions after any number of fitting characters, in one addition.

        A start inside a run of fitting characters carries to the end of the run; what the carry
        changed is what was passed. Source: Cameron et al., "Bitwise data parallelism in regular
        expression matching", PACT 2014, section 2 (MatchStar).
        """
        fits = self._fits(text)
        return (((starts & fits) + fits) ^ fits) | starts

    def _fits(self, text: Text) -> int:
        fits = text.known.get(id(self))
        if fits is None:
            text.work.spend(len(text.chars))
            fits = sum(1 << p for p, char in enumerate(text.chars) if self.test(char))
            text.known[id(self)] = fits
        return fits


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other."""

    parts: tuple[Node, ...]

    @property
    def min_width(self) -> int:
        return sum(part.min_width for part in self.parts)

    @property
    def max_width(self) -> int | None:
        widths = [part.max_width for part in self.parts]
        return None if None in widths else sum(w for w in widths if w is not None)

    def ends(self, text: Text, starts: int) -> int:
        text.work.spend(len(self.parts))
        for part in self.parts:
            starts = part.ends(text, starts)
        return starts

    def starts(self, text: Text, ends: int) -> int:
        text.work.spend(len(self.parts))
        for part in reversed(self.parts):
            ends = part.starts(text, ends)
        return ends


@dataclass(frozen=True, slots=True)
class Branches:
    """Any one of several parts."""

    parts: tuple[Node, ...]

    @property
    def min_width(self) -> int:
        return min(part.min_width for part in self.parts)

    @property
    def max_width(self) -> int | None:
        widths = [part.max_width for part in self.parts]
        return None if None in widths else max(w for w in widths if w is not None)

    def ends(self, text: Text, starts: int) -> int:
        text.work.spend(len(self.parts))
        result = 0
        for part in self.parts:
            result |= part.ends(text, starts)
        return result

    def starts(self, text: Text, ends: int) -> int:
        text.work.spend(len(self.parts))
        result = 0
        for part in self.parts:
            result |= part.starts(text, ends)
        return result


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `low` to `high` times (None = any number). With high > 1, the part never matches
    nothing."""

    part: Node
    low: int
    high: int | None

    @property
    def min_width(self) -> int:
        return self.low * self.part.min_width

    @property
    def max_width(self) -> int | None:
        width = self.part.max_width
        return None if width is None or self.high is None else self.high * width

    def ends(self, text: Text, starts: int) -> int:
        if self.high is None and isinstance(self.part, Char):
            text.work.spend(self.low + 1)
            for _ in range(self.low):
                starts = self.part.ends(text, starts)
            return self.part.closure(text, starts)
        return self._rounds(text, starts, self.part.ends)

    def starts(self, text: Text, ends: int) -> int:
        return self._rounds(text, ends, self.part.starts)

    def _rounds(self, text: Text, positions: int, step: Callable[[Text, int], int]) -> int:
        reached = positions if self.low == 0 else 0
        count = 0
        while positions and (self.high is None or count < self.high):
            text.work.spend(2)
            count += 1
            positions = step(text, positions)
            if count >= self.low:
                positions &= ~reached  # a position reached before had more rounds left
                reached |= positions
        return reached


@dataclass(frozen=True, slots=True)
class Anchor:
    """A condition on a position between two characters, such as `^` or `\\b`."""

    test: Callable[[str, int], bool]
    min_width: int = 0
    max_width: int | None = 0

    def ends(self, text: Text, starts: int) -> int:
        holds = text.known.get(id(self))
        if holds is None:
            text.work.spend(len(text.chars))
            holds = sum(1 << p for p in range(len(text.chars) + 1) if self.test(text.chars, p))
            text.known[id(self)] = holds
        return starts & holds

    starts = ends


@dataclass(frozen=True, slots=True)
class LookAround:
    """A condition on what comes after (`ahead`) or before a position."""

    part: Node
    ahead: bool
    negative: bool
    min_width: int = 0
    max_width: int | None = 0

    def ends(self, text: Text, starts: int) -> int:
        holds = text.known.get(id(self))
        if holds is None:
            look = self.part.starts if self.ahead else self.part.ends
            holds = look(text, text.everywhere)
            text.known[id(self)] = holds
        return starts & (text.everywhere & ~holds if self.negative else holds)

    starts = ends


def matches_all(node: Node, chars: str, work: Work) -> bool:
    """Whether the whole of `chars` matches, as `re.fullmatch` would say.

    Mutates: `work`.
    Raises: BadPattern when no work is left.
    """
    return bool(node.ends(Text(chars, work), 1) >> len(chars) & 1)


def matches_start(node: Node, chars: str, work: Work) -> bool:
    """Whether some start of `chars` matches, as `re.match` would say.

    Mutates: `work`.
    Raises: BadPattern when no work is left.
    """
    return node.ends(Text(chars, work), 1) != 0
