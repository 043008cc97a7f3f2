"""Parses and generates API keys, which are texts of the form `lpx_<id>_<secret>`."""

from __future__ import annotations

import re
import secrets

TOKEN = re.compile(r"lpx_([a-z0-9]{4,32})_([A-Za-z0-9]{16,128})")
"""Groups: the id and the secret."""

_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


def draw_key() -> tuple[str, str]:
    """A new random id and secret."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(12))
    return key_id, secrets.token_hex(24)


def token_of(key_id: str, secret: str) -> str:
    """The key as callers send it."""
    return f"lpx_{key_id}_{secret}"
