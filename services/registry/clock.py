"""Time and identifiers that sort by time."""

from __future__ import annotations

import secrets
import time

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def now_s() -> float:
    """Unix time of this machine: for records that people read, never for decisions about bytes."""
    return time.time()


def ulid(time_s: float) -> str:
    """26 characters that sort by time, then at random."""
    number = (int(time_s * 1000) << 80) | secrets.randbits(80)
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))
