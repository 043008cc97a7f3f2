"""Escapes control characters in texts that people read in terminals and logs."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with its control characters escaped. Labels, names and errors that others wrote
    could otherwise move the cursor or forge lines."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
