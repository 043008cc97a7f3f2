"""Finds the alternatives of an argument within the schema of a function.

This is done on the event loop, for each argument. What is read for one of them is therefore
bounded, however large the schema is and however its parts refer to each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex_services.gateway.tools.schema_keywords import (
    options_of,
    parts_of,
    pointed,
    types_of,
)

_DEEPEST = 8
_MOST_ALTERNATIVES = 128


@dataclass(frozen=True, slots=True)
class Alternative:
    """A schema that a value may follow."""

    types: Sequence[str]
    """Types that it allows; empty = any."""
    schema: Mapping[str, Any]


_ANYTHING = Alternative((), {})


def alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Alternative]:
    """The schemas within anyOf, oneOf, allOf and behind references, down to those without such
    parts. A value follows at least one of them.

    Each reference is followed once: schemas that refer to each other ten times on each of ten
    levels have 10^10 paths. In place of what is nested too deeply or comes after the first 128
    schemas, one schema that allows anything is returned.

    Args:
        root: the schema that `#` in references stands for.
    """
    left: list[tuple[Any, Sequence[str], int]] = [(schema, (), 0)]
    seen: set[str] = set()
    for _ in range(_MOST_ALTERNATIVES):
        if not left:
            return
        part, types, depth = left.pop()
        if not isinstance(part, dict) or depth > _DEEPEST:
            yield _ANYTHING
            continue
        types = types_of(part) or types
        if isinstance(reference := part.get("$ref"), str):
            if reference not in seen:
                seen.add(reference)
                left.append((pointed(reference, root), types, depth + 1))
        elif options_of(part) is None and (parts := parts_of(part, "anyOf", "oneOf", "allOf")):
            first = itertools.islice(parts, _MOST_ALTERNATIVES)
            left += reversed([(each, types, depth + 1) for each in first])
        else:
            yield Alternative(types, part)
    if left:
        yield _ANYTHING
