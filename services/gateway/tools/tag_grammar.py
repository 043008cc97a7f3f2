"""Grammars of calls that are written as tags: arguments as plain text between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from loraplex_services.gateway.tools.call_schemas import argument, check_grammar_chars
from loraplex_services.gateway.tools.schema_keywords import (
    options_of,
    properties_of,
    required_of,
)
from loraplex_services.gateway.tools.schema_parts import Alternative, alternatives

_CHARS_PER_ALTERNATIVE = 16
"""Alternatives count towards the length of a grammar even if nothing in it is due to them: reading
1,400 arguments with 128 each takes most of a second."""


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
        found = list(alternatives(value, schema))
        rules.append(_value(key, found, schema, value_rule, closes))
        part = f"{opens.format(json.dumps(key)[1:-1])} {value_rule} SPACE"
        parts.append(part if key in required else f"({part})?")
        num_chars += len(rules[-1]) + len(part) + _CHARS_PER_ALTERNATIVE * len(found)
        check_grammar_chars(num_chars)
    return " ".join(parts), rules


def _value(
    key: str, found: Sequence[Alternative], root: dict[str, Any], rule: str, closes: str
) -> str:
    """The rule of one value up to its closing mark. Strings are plain text, unless they are
    options; other constraints of a schema on strings are not enforced."""
    options = [_options(each) for each in found]
    end = json.dumps(closes)
    if options and None not in options:
        texts = (_plain_text(value) for values in options for value in values or ())
        return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {end}"
    if any(map(_may_be_text, found)):
        return f"{rule}[lazy]: TEXT {end}"
    return f"{rule}: %json {json.dumps(argument(root, key))} {end}"


def _options(alternative: Alternative) -> list[Any] | None:
    """All values that it allows; None = not a list."""
    return [None] if alternative.types == ["null"] else options_of(alternative.schema)


def _plain_text(value: Any) -> str:
    """A value as it is written between tags."""
    return value if isinstance(value, str) else json.dumps(value)


def _may_be_text(alternative: Alternative) -> bool:
    """Whether strings are among what it allows."""
    if alternative.types:
        return "string" in alternative.types
    return alternative.schema.keys().isdisjoint(("properties", "items"))
