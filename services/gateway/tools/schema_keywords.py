"""Reads the keywords of a JSON Schema. Nobody checks the schemas of functions that a model may call
freely, so that a keyword whose value has the wrong type, such as null, counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NUM_TYPES = 7
"""JSON Schema has no more types."""


def options_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values that `const` or `enum` allow; None = neither is there."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The names under `type`; empty = any."""
    named = schema.get("type")
    named = named[:_NUM_TYPES] if isinstance(named, list) else [named]
    return [each for each in named if isinstance(each, str)]


def parts_of(schema: Mapping[str, Any], *keywords: str) -> list[Any]:
    """The schemas under the first of these keywords that has any."""
    lists = (schema.get(keyword) for keyword in keywords)
    return next((each for each in lists if each and isinstance(each, list)), [])


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of each property; None = none are named."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else None


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The names of the properties that an object must have."""
    names = schema.get("required")
    names = names if isinstance(names, list) else []
    return frozenset(each for each in names if isinstance(each, str))


def pointed(reference: str, root: Mapping[str, Any]) -> Any:
    """The value that `#/a/b` refers to; None for other references."""
    found: Any = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        found = found.get(step) if isinstance(found, dict) else None
    return found
