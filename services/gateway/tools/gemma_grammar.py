"""Grammar of calls as Gemma 4 writes them; `gemma_calls` shows one."""

from __future__ import annotations

import json
from typing import Any

from loraplex_services.gateway.tools.call_schemas import check_grammar_chars
from loraplex_services.gateway.tools.schema_keywords import (
    options_of,
    parts_of,
    pointed,
    properties_of,
    required_of,
    types_of,
)

_DEEPEST = 8
"""Levels of a schema that are enforced. Below them, any value is allowed."""
_SCALARS = ("integer", "number", "boolean", "null")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

ANY_VALUE = r"""
any_value: string | NUMBER | "true" | "false" | "null" | any_object | any_list
any_object: "{" (any_pair ("," any_pair)*)? "}"
any_pair: KEY ":" any_value
any_list: "[" (any_value ("," any_value)*)? "]"
KEY: /[A-Za-z0-9_.-]{1,64}/
NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?/
"""
"""Rules that `gemma_body` refers to, besides `string` and `quote`."""


def gemma_body(name: str, schema: dict[str, Any], rule: str) -> list[str]:
    """Rules of `name{...}`, the first of them called `rule`.

    Keys come in the order of the alphabet, as the template writes them. Strings are kept to their
    options and to nothing else that a schema says of strings.
    """
    rules = _Rules(schema, rule)
    arguments = rules.object(schema, 0)
    return [f"{rule}: {json.dumps(name)} {arguments}", *rules.made]


class _Rules:
    """Makes the rules of one function's arguments."""

    def __init__(self, root: dict[str, Any], prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self._num_chars = 0
        self._references: dict[str, str] = {}
        """The rule of each reference; schemas may refer to each other on 10^9 paths."""
        self._num_rules = 0
        self.made: list[str] = []

    def value(self, schema: Any, depth: int) -> str:
        """An expression for one value."""
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference)
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return "any_value"
        if (options := options_of(schema)) is not None:
            return f"({' | '.join(map(_literal, options))})"
        if parts := parts_of(schema, "anyOf", "oneOf"):
            return f"({' | '.join(self.value(part, depth + 1) for part in parts)})"
        types = types_of(schema) or ["object"] * ("properties" in schema)
        return f"({' | '.join(self._typed(each, schema, depth) for each in types) or 'any_value'})"

    def _referred(self, reference: str) -> str:
        """The rule of a definition, which may refer to itself."""
        if reference not in self._references:
            self._references[reference] = name = self._new_name()
            self._add(name, self.value(pointed(reference, self._root), 0))
        return self._references[reference]

    def _typed(self, name: str, schema: dict[str, Any], depth: int) -> str:
        if name == "string":
            return "string"
        if name in _SCALARS:
            bounds = {key: schema[key] for key in _BOUNDS if key in schema}
            return self._rule(f"%json {json.dumps({'type': name, **bounds})}")
        if name == "array":
            item = self.value(schema["items"], depth + 1) if "items" in schema else "any_value"
            some = f'{item} ("," {item})*'
            return f'"[" {some} "]"' if schema.get("minItems") else f'"[" ({some})? "]"'
        return self.object(schema, depth)

    def object(self, schema: dict[str, Any], depth: int) -> str:
        """An expression for an object of given properties, those that are required and others; for
        any object if none are named."""
        if (properties := properties_of(schema)) is None:
            return "any_object"
        required = required_of(schema)
        first, later = '""', '""'
        for key, value in sorted(properties.items(), reverse=True):
            pair = f"{json.dumps(key + ':')} {self.value(value, depth + 1)}"
            pair = self._rule(pair)
            after = self._rule(later) if later != '""' else later
            skipped = (f" | {first}", f" | {after}") if key not in required else ("", "")
            first = self._rule(f"{pair} {after}{skipped[0]}")
            later = f'"," {pair} {after}{skipped[1]}'
        return f'"{{" {first} "}}"'

    def _rule(self, body: str) -> str:
        """The name of a new rule."""
        name = self._new_name()
        self._add(name, body)
        return name

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"

    def _add(self, name: str, body: str) -> None:
        """Raises: InvalidRequest as soon as the rules are too long."""
        self.made.append(f"{name}: {body}")
        self._num_chars += len(self.made[-1])
        check_grammar_chars(self._num_chars)


def _literal(value: Any) -> str:
    """One value as the model writes it."""
    if isinstance(value, str):
        return f"quote {json.dumps(value)} quote"
    if isinstance(value, list):
        return " ".join(['"["', ' "," '.join(map(_literal, value)), '"]"'])
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key + ':')} {_literal(each)}" for key, each in sorted(value.items()))
        return " ".join(['"{"', ' "," '.join(pairs), '"}"'])
    return json.dumps(json.dumps(value))
