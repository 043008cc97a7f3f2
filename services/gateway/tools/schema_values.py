"""Converts values that a model wrote as plain text to JSON, guided by the schema of the
function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loraplex_services.gateway.tools.schema_keywords import options_of, properties_of
from loraplex_services.gateway.tools.schema_parts import alternatives

_MOST_OPTIONS = 128
"""Options whose types are looked at."""
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
    types = _types_of(properties[name], parameters)
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


def _types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Types that a schema allows, by name or by its options; none = any."""
    found = set[str]()
    for each in alternatives(schema, root):
        options = (options_of(each.schema) or ())[:_MOST_OPTIONS]
        found |= set(each.types) or set().union(*(_TYPES[type(value)] for value in options))
    return frozenset(found)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
