"""Identifiers that sort by time."""

from __future__ import annotations

import secrets

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
"""The digits of base 32 in ascending order, without the letters i, l, o and u."""


def ulid(time_s: float) -> str:
    """26 characters that sort by time, then at random."""
    return _text((int(time_s * 1000) << 80) | secrets.randbits(80))


def first_ulid(time_s: float) -> str:
    """The smallest of a moment: all of earlier moments sort before it."""
    return _text(int(time_s * 1000) << 80)


def time_of_ulid(text: str) -> float:
    """The unix time in seconds, to the millisecond, that an identifier was made at."""
    milliseconds = 0
    for character in text[:10]:
        milliseconds = milliseconds << 5 | _CROCKFORD.index(character)
    return milliseconds / 1000


def _text(number: int) -> str:
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))
