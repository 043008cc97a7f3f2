"""Grammars of calls that are written as tags: arguments as plain text between them."""

from __future__ import annotations

import json
from typing import Any

from loraplex_services.gateway.tools.call_schemas import argument, check_grammar_chars
from loraplex_services.gateway.tools.schema_keywords import (
    is_new,
    options_of,
    parts_of,
    pointed,
    properties_of,
    required_of,
    types_of,
)

_DEEPEST = 8


def coder_body(name: str, schema: dict[str, Any], rule: str) -> list[str]:
    """`name>` to `</function>`, as Qwen3-Coder writes it behind `<function=`."""
    arguments, rules = _arguments(schema, rule, '"<parameter={}>\\n"', "\n</parameter>")
    body = f'{json.dumps(name + ">")} SPACE {arguments} "</function>"'
    return [f"{rule}: {body}", *rules]


def glm_body(name: str, schema: dict[str, Any], rule: str) -> list[str]:
    """`name` and `<arg_key>`, `<arg_value>` pairs, as GLM writes them behind `<tool_call>`."""
    opens = '"<arg_key>{}</arg_key>" SPACE "<arg_value>"'
    arguments, rules = _arguments(schema, rule, opens, "</arg_value>")
    return [f"{rule}: {json.dumps(name)} SPACE {arguments}", *rules]


def _arguments(schema: dict[str, Any], rule: str, opens: str, closes: str) -> tuple[str, list[str]]:
    """All arguments in the schema's order, and the rules of their values.

    Args:
        opens: what stands before a value, with {} for its key, in Lark.
        closes: the text after it.
    """
    parts, rules = [], []
    required = required_of(schema)
    num_chars = 0
    for number, (key, value) in enumerate((properties_of(schema) or {}).items()):
        value_rule = f"{rule}_{number}"
        rules.append(_value(key, value, schema, value_rule, closes))
        part = f"{opens.format(json.dumps(key)[1:-1])} {value_rule} SPACE"
        parts.append(part if key in required else f"({part})?")
        num_chars += len(rules[-1]) + len(part)
        check_grammar_chars(num_chars)
    return " ".join(parts), rules


def _value(key: str, schema: Any, root: dict[str, Any], rule: str, closes: str) -> str:
    """The rule of one value up to its closing mark. Strings are plain text, unless they are
    options; other constraints of a schema on strings are not enforced."""
    options = _options(schema, root, set())
    end = json.dumps(closes)
    if options is not None:
        return f"{rule}: ({' | '.join(json.dumps(each) for each in options)}) {end}"
    if _may_be_text(schema, root, set()):
        return f"{rule}[lazy]: TEXT {end}"
    return f"{rule}: %json {json.dumps(argument(root, key))} {end}"


def _options(schema: Any, root: dict[str, Any], seen: set[str], depth: int = 0) -> list[str] | None:
    """All values that a schema allows as they are written between tags; None = not a list. Mutates:
    seen, the references that were followed."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        is_first = is_new(schema, seen)
        return _options(pointed(reference, root), root, seen, depth + 1) if is_first else []
    if (values := options_of(schema)) is not None:
        return [each if isinstance(each, str) else json.dumps(each) for each in values]
    if types_of(schema) == ["null"]:
        return ["null"]
    found: list[str] = []
    parts = parts_of(schema, "anyOf", "oneOf")
    for part in parts:
        options = _options(part, root, seen, depth + 1)
        if options is None:
            return None
        found += options
    return found if parts else None


def _may_be_text(schema: Any, root: dict[str, Any], seen: set[str], depth: int = 0) -> bool:
    """Whether strings are among what a schema allows. Mutates: seen."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return True
    if isinstance(reference := schema.get("$ref"), str):
        is_first = is_new(schema, seen)
        return is_first and _may_be_text(pointed(reference, root), root, seen, depth + 1)
    if parts := parts_of(schema, "anyOf", "oneOf", "allOf"):
        return any(_may_be_text(part, root, seen, depth + 1) for part in parts)
    if types := types_of(schema):
        return "string" in types
    return "properties" not in schema and "items" not in schema
