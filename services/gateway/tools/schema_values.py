"""Converts values that a model wrote as plain text to JSON, guided by the schema of the
function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
    properties = parameters.get("properties")
    if not isinstance(properties, dict) or name not in properties:
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
    named = schema.get("type")
    types = frozenset([named] if isinstance(named, str) else named or ())
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    if not types and values:
        types = frozenset().union(*(_TYPES[type(value)] for value in values))
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, ())]
    if is_new(schema, seen):
        parts.append(pointed(schema["$ref"], root))
    return types.union(*(_types_of(part, root, seen, depth + 1) for part in parts))


def is_new(schema: Mapping[str, Any], seen: set[str]) -> bool:
    """Whether a schema has a reference that was not followed before. Mutates: seen.

    What is looked for in a schema is a union over its parts, so each reference is followed once:
    schemas that refer to each other ten times on each of ten levels have 10^10 paths.
    """
    reference = schema.get("$ref")
    if not isinstance(reference, str) or reference in seen:
        return False
    seen.add(reference)
    return True


def pointed(reference: str, root: Mapping[str, Any]) -> Any:
    """The value that `#/a/b` refers to; None for other references."""
    found: Any = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
