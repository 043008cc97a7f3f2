"""Converts values that a model wrote as plain text to JSON, guided by the schema of the
function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loraplex_services.gateway.tools.schema_keywords import (
    is_new,
    options_of,
    parts_of,
    pointed,
    properties_of,
    types_of,
)

_DEEPEST = 8
_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


def json_value(text: str, name: str, parameters: Mapping[str, Any]) -> str:
    """JSON of one argument. A value that does not match its schema, or has none, is a string.

    Args:
        text: as written.
        name: of the argument.
        parameters: JSON Schema of all arguments of the function.
    """
    properties = properties_of(parameters) or {}
    if name not in properties:
        return _json_text(text)
    types = _types_of(properties[name], parameters, set())
    if types == {"string"}:
        return _json_text(text)
    word = text.strip()
    try:
        value = value_of(word)
    except (ValueError, RecursionError):
        return _json_text(text)
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    return _json_text(value if not types or types & _TYPES[type(value)] else text)


def value_of(word: str) -> Any:
    """The value of a text that is JSON, or a word of Python. Raises: ValueError."""
    value = json.loads(_WORDS.get(word, word))
    json.dumps(value, allow_nan=False)  # raises for NaN and infinities, which JSON lacks
    return value


def _types_of(
    schema: Any, root: Mapping[str, Any], seen: set[str], depth: int = 0
) -> frozenset[str]:
    """Types that a schema names, itself or in its parts; none = any. Mutates: seen."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return frozenset()
    types = frozenset(types_of(schema))
    if not types:
        types = types.union(*(_TYPES[type(value)] for value in options_of(schema) or ()))
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in parts_of(schema, key)]
    if is_new(schema, seen):
        parts.append(pointed(schema["$ref"], root))
    return types.union(*(_types_of(part, root, seen, depth + 1) for part in parts))


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
