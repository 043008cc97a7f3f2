"""Parses the text of flags and variables. Each parser raises ValueError with what it accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from loraplex.units import parse_bytes, parse_seconds

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def parse_bool(text: str) -> bool:
    """1/true/yes/on and 0/false/no/off."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("expected true or false")


def parse_text(text: str) -> str:
    """Any text that is not blank."""
    if not text.strip():
        raise ValueError("expected some text")
    return text.strip()


def parse_path(text: str) -> Path:
    """A path that is not blank: `Path("")` would be the current folder."""
    return Path(parse_text(text))


def parse_list(text: str) -> tuple[str, ...]:
    """Comma-separated items without blanks."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


ATTENTION_GROUP = "loraplex.attention_backends"
"""Entry points by which a package registers attention backends."""


def choice(*options: str, group: str = "") -> Callable[[str], str]:
    """A parser of one of `options`.

    Args:
        group: of entry points, whose names are options as well. Nothing is imported.
    """

    def parse(text: str) -> str:
        registered = _registered(group) if text.strip() not in options else ()
        if text.strip() in registered:
            return text.strip()
        if text.strip() not in options:
            known = ", ".join((*options, *registered))
            others = f", or a name that a package registers in {group}"
            raise ValueError(f"expected one of {known}{others if group else ''}")
        return text.strip()

    parse.__name__ = "|".join((*options, "NAME") if group else options)
    return parse


def _registered(group: str) -> Sequence[str]:
    return sorted(metadata.entry_points(group=group).names) if group else ()


MAX_INTEGER = 2**31 - 1
_MAX_DIGITS = 19


def parse_digits(text: str) -> int | None:
    """The number that up to 19 digits spell; None for any other text. Python's `int` takes digits
    of all scripts, and raises for thousands of them."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else None


def integer(at_least: int = 0, at_most: int = MAX_INTEGER) -> Callable[[str], int]:
    """A parser of integers within bounds."""

    def parse(text: str) -> int:
        number = parse_digits(text.strip())
        if number is None or not at_least <= number <= at_most:
            raise ValueError(f"expected an integer of at least {at_least} and at most {at_most}")
        return number

    parse.__name__ = "number"
    return parse


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, or a share of what is free; neither = chosen where it is used."""

    num_bytes: int = 0
    share: float = 0.0

    def __str__(self) -> str:
        """The form that `parse_memory` reads; "" where neither is given."""
        return f"{self.share * 100:g}%" if self.share else str(self.num_bytes or "")


def parse_memory(text: str) -> Memory:
    """`24MiB`, a number of bytes, or `85%`."""
    if text.strip().endswith("%"):
        return Memory(share=_number(text.strip()[:-1], 100.0, "a percentage above 0%") / 100)
    try:
        num_bytes = parse_bytes(text)
    except ValueError:
        num_bytes = 0
    if not num_bytes:
        raise ValueError("expected more than 0 bytes, such as 24MiB, or a percentage such as 85%")
    return Memory(num_bytes)


def parse_some_seconds(text: str) -> float:
    """A time above 0, as `parse_seconds` reads it."""
    if not (seconds := parse_seconds(text)):
        raise ValueError("expected a time above 0, such as 20, 500ms or 5m")
    return seconds


def parse_share(text: str) -> float:
    """A number above 0 and at most 1."""
    return _number(text, 1.0, "a number above 0")


def _number(text: str, at_most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= at_most:
        raise ValueError(f"expected {what} and at most {at_most:g}")
    return value


def parse_store_url(text: str) -> str:
    """The address of an object store."""
    url = text.strip()
    parts = urlsplit(url)
    if parts.scheme == "file":
        is_good = parts.netloc in ("", "localhost") and parts.path not in ("", "/")
    else:
        is_good = parts.scheme == "s3" and parts.netloc != ""
    if not is_good:
        raise ValueError("must be file:///absolute/path or s3://bucket/prefix")
    return url


def parse_model(text: str) -> str:
    """A folder, a file or a hub id, which is not checked; an `s3://` address must have a bucket."""
    model = parse_text(text)
    if model.startswith("s3://") and not urlsplit(model).netloc:
        raise ValueError("must be s3://BUCKET/PREFIX, a folder, a GGUF file or a hub id")
    return model


def parse_listen(text: str) -> str:
    """`HOST:PORT`, `[IPV6]:PORT` or `unix:/path`."""
    address = text.strip()
    if address.startswith("unix:/"):
        return address
    host, colon, port = address.rpartition(":")
    number = parse_digits(port)
    if not colon or not host or number is None or number > 65535:
        raise ValueError("expected HOST:PORT (port 0 = any free one) or unix:/path")
    return address
