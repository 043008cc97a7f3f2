"""Parses untrusted JSON: one object, UTF-8, bounded in bytes and depth, no duplicate keys, no NaN.

Python's `json` keeps the last of two equal keys, reads NaN and turns 1e999 into infinity; two
readers of one file could then disagree about what it says. Everything ambiguous is refused here.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

from loraplex.errors import InvalidAdapter

MAX_DEPTH = 16
MAX_DIGITS = 20

_NO_BRACKETS = re.compile(r"[^\[\]{}]+")


class _Refused(Exception):
    """Carries a description out of a hook of `json.loads`."""


def read_object(raw: bytes, source: str, max_bytes: int) -> dict[str, object]:
    """Parse one JSON object.

    Args:
        raw: the file's bytes.
        source: name of the file, the field of every violation.
        max_bytes: the most bytes to look at.

    Raises:
        InvalidAdapter: saying what is wrong and the way out.
    """
    if len(raw) > max_bytes:
        _refuse(source, f"{len(raw)} bytes", f"is larger than {max_bytes} bytes")
    text = _decode(raw, source)
    if _is_too_deep(text):
        _refuse(source, "...", f"is nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
        _check_strings(value)
    except _Refused as refused:
        _refuse(source, "...", str(refused))
    except json.JSONDecodeError as error:
        _refuse(source, "...", f"is not JSON: {error.msg} at line {error.lineno}; save it again")
    if not isinstance(value, dict):
        _refuse(source, value, f"must be a JSON object, not {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def _refuse(source: str, value: object, description: str) -> NoReturn:
    raise InvalidAdapter.field(source, value, description)


def _decode(raw: bytes, source: str) -> str:
    if raw.startswith(b"\xef\xbb\xbf"):
        _refuse(source, "EF BB BF", "starts with a byte order mark; save it as plain UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(source, f"byte {error.start}", "is not UTF-8; save it again as UTF-8")


def _is_too_deep(text: str) -> bool:
    """Whether brackets outside strings nest deeper than `MAX_DEPTH`, found without recursion.

    Only the part before an unclosed quote is measured, because `json` refuses such a text anyway.
    """
    depth = 0
    for char in _without_strings(text):
        if char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        else:
            depth -= 1
    return False


def _without_strings(text: str) -> str:
    """`text` cut down to its brackets outside of strings."""
    unescaped = text.replace("\\\\", "").replace('\\"', "")
    outside = "".join(unescaped.split('"')[::2])
    return _NO_BRACKETS.sub("", outside)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"has the key {key[:64]!r} twice; keep one of them")
            seen.add(key)
    return result


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused(f"has a number of {len(digits)} digits; at most {MAX_DIGITS} are accepted")
    return int(digits)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"has the number {text[:32]}, which is out of range")
    return value


def _constant(text: str) -> NoReturn:
    raise _Refused(f"has {text}, which is not JSON; write a finite number")


def _check_strings(value: object) -> None:
    """Refuse lone surrogates, which could be neither stored nor shown."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise _Refused("has a string with half a surrogate pair") from None
    elif isinstance(value, list):
        for item in value:
            _check_strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_strings(key)
            _check_strings(item)
