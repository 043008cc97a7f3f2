"""Reads single config fields with their types. The error for a wrong type says what is expected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.patterns import (
    ALL_LINEAR,
    PLAIN_NAME,
    Names,
    pattern_of_key,
)
from loraplex.adapter_format.regex import BadPattern
from loraplex.adapter_format.regex_parser import parse
from loraplex.adapter_format.strict_json import kind_of

MAX_LIST_ITEMS = 100_000
MAX_NAMES = 10_000
MAX_PLAIN_NAMES = 64
MAX_PATTERNS = 4096
MAX_EXPRESSIONS = 512
MAX_EXPRESSION_CHARS = 65_536
"""All expressions of one field together. Parsing these takes up to about 0.1 s."""
MAX_NAME_CHARS = 256


@dataclass(slots=True)
class AdapterConfigReader:
    """The fields of one config. Getters return PEFT's default for an absent or refused field."""

    fields: dict[str, object]
    findings: Findings
    source: str

    def refuse(self, field: str, value: object, description: str) -> None:
        """Record a refusal of `field`."""
        self.findings.refuse(f"{self.source}:{field}", value, description)

    def warn(self, field: str, value: object, description: str) -> None:
        """Record a warning about `field`."""
        self.findings.warn(f"{self.source}:{field}", value, description)

    def flag(self, field: str) -> bool:
        """A boolean."""
        value = self.fields.get(field, False)
        if isinstance(value, bool):
            return value
        self.refuse(field, value, f"must be true or false, not {kind_of(value)}")
        return False

    def text(self, field: str) -> str | None:
        """A string or null."""
        value = self.fields.get(field)
        if value is None or isinstance(value, str):
            return value
        self.refuse(field, value, f"must be a string or null, not {kind_of(value)}")
        return None

    def rank(self, field: str, default: int) -> int:
        """An integer of at least 1."""
        value = self.fields.get(field, default)
        if _is_rank(value):
            return value
        self.refuse(field, value, "must be an integer of at least 1")
        return default

    def number(self, field: str, default: float) -> float:
        """A finite number."""
        value = self.fields.get(field, default)
        if _is_number(value):
            return float(value)
        self.refuse(field, value, "must be a finite number")
        return default

    def plain_names(self, field: str) -> tuple[str, ...]:
        """A short list of module names (or one name, or null), in order, without patterns."""
        value = self.fields.get(field)
        names = [value] if isinstance(value, str) and value else value or []
        if not isinstance(names, list) or len(names) > MAX_PLAIN_NAMES:
            self.refuse(field, value, f"must be a list of at most {MAX_PLAIN_NAMES} module names")
            return ()
        for name in names:
            if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
                self.refuse(field, name, "is not a plain module name (letters, digits, _ and .)")
                return ()
        return tuple(names)

    def names(self, field: str) -> Names | None:
        """A regular expression, or a list of suffixes (returned sorted, each once), or null."""
        value = self.fields.get(field)
        if value is None:
            return None
        if isinstance(value, str):
            self._check_pattern(field, value)
            return value
        if not isinstance(value, list) or len(value) > MAX_NAMES:
            self.refuse(field, value, "must be a list of module names or a regular expression")
            return None
        for name in value:
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
                self.refuse(field, name, f"must hold names of 1 to {MAX_NAME_CHARS} characters")
                return None
        return tuple(sorted(set(value)))

    def indices(self, field: str) -> tuple[int, ...]:
        """A list of integers (or one, or null), sorted, each once."""
        value = self.fields.get(field)
        numbers: object = [value] if type(value) is int else value
        if value is None:
            return ()
        if not is_index_list(numbers):
            self.refuse(field, value, "must be an integer from 0, a list of them, or null")
            return ()
        return tuple(sorted(set(numbers)))

    def ranks_by_pattern(self, field: str) -> tuple[tuple[str, int], ...]:
        """A map of patterns to ranks, in the file's order."""
        pairs: list[tuple[str, int]] = []
        for pattern, value in self._pattern_map(field):
            if _is_rank(value):
                pairs.append((pattern, value))
            else:
                self.refuse(f"{field}.{pattern}", value, "must be an integer of at least 1")
        return tuple(pairs)

    def numbers_by_pattern(self, field: str) -> tuple[tuple[str, float], ...]:
        """A map of patterns to finite numbers, in the file's order."""
        pairs = []
        for pattern, value in self._pattern_map(field):
            if _is_number(value):
                pairs.append((pattern, float(value)))
            else:
                self.refuse(f"{field}.{pattern}", value, "must be a finite number")
        return tuple(pairs)

    def _pattern_map(self, field: str) -> list[tuple[str, object]]:
        value = self.fields.get(field) or {}
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            self.refuse(field, value, f"must be an object of at most {MAX_PATTERNS} patterns")
            return []
        sizes = [len(key) for key in value if not PLAIN_NAME.fullmatch(key)]
        if len(sizes) > MAX_EXPRESSIONS or sum(sizes) > MAX_EXPRESSION_CHARS:
            found = f"{len(sizes)} expressions of {sum(sizes)} characters"
            limit = f"{MAX_EXPRESSIONS}, of {MAX_EXPRESSION_CHARS} characters together"
            self.refuse(field, found, f"the keys that are expressions may be at most {limit}")
            return []
        return [pair for pair in value.items() if self._check_key(field, pair[0])]

    def _check_key(self, field: str, key: str) -> bool:
        try:
            parse(pattern_of_key(key))
        except BadPattern as error:
            self.refuse(f"{field}.{key}", key, f"{error}; write a simpler pattern")
            return False
        return True

    def _check_pattern(self, field: str, pattern: str) -> None:
        if pattern.lower() == ALL_LINEAR:
            return
        try:
            parse(pattern)
        except BadPattern as error:
            self.refuse(field, pattern, f"{error}; write a simpler pattern or a list of names")


def is_index_list(value: object) -> TypeGuard[list[int]]:
    """Whether it is a list of integers from 0 on, of a sane length."""
    if not isinstance(value, list) or len(value) > MAX_LIST_ITEMS:
        return False
    return all(type(v) is int and 0 <= v < 2**31 for v in value)


def _is_rank(value: object) -> TypeGuard[int]:
    return type(value) is int and 1 <= value < 2**31


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
