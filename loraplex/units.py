"""Parses sizes such as `24MiB` and times such as `5m`, and spells counts. The parsers raise
ValueError that says what they accept."""

from __future__ import annotations

import re

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_SECONDS_PER = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """`24MiB` -> 25165824, `1.5G` -> 1500000000, `4096` -> 4096."""
    match = _BYTES.fullmatch(text.strip())
    if not match or (match[3] and not match[2]):
        raise ValueError("expected a number of bytes such as 4096, 500MB or 24MiB")
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** _EXPONENTS[match[2].lower()])


def parse_seconds(text: str) -> float:
    """`20` -> 20.0, `500ms` -> 0.5, `5m` -> 300.0."""
    match = _SECONDS.fullmatch(text.strip().lower())
    if not match:
        raise ValueError("expected a time such as 20, 500ms or 5m")
    return float(match[1]) * _SECONDS_PER[match[2] or ""]


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1, "tensor"` -> "1 tensor", `2, "entry", "entries"` -> "2 entries". The plural is `noun`
    with an "s" unless given."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"
