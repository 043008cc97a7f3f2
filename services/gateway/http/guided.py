"""Parses the fields with which OpenAI's and vLLM's clients constrain the output."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from loraplex.api.sampling import Grammar
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.gateway.http.body import Body, bad_type

ANY_OBJECT = Grammar(json_schema='{"type":"object"}')

Reader = Callable[[str, Any], Grammar | None]


def read_grammar(body: Body) -> tuple[Grammar | None, str]:
    """The grammar of a body, and the field that contains it.

    Raises: InvalidRequest for two of them or a wrong type, Unsupported for a kind not served.
    """
    found = [
        (grammar, name)
        for name, read in _FIELDS.items()
        if (value := body.raw(name)) is not None and (grammar := read(name, value)) is not None
    ]
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise InvalidRequest.field(found[1][1], "", f"{names} exclude each other; send only one")
    return found[0] if found else (None, "grammar")


def _response_format(name: str, value: Any) -> Grammar | None:
    if not isinstance(value, dict):
        raise bad_type(name, value, "an object with a type")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise Unsupported.field(name, "", "the type must be text, json_object or json_schema")
    wrapped = value.get("json_schema")
    field = f"{name}.json_schema"
    if not isinstance(wrapped, dict):
        raise bad_type(field, wrapped, "an object with name and schema")
    schema = wrapped.get("schema")
    if not isinstance(schema, dict):
        raise bad_type(f"{field}.schema", schema, "a JSON Schema")
    return Grammar(json_schema=schema)


def _json(name: str, value: Any) -> Grammar | None:
    """vLLM takes a schema as an object or as text."""
    if not isinstance(value, dict | str):
        raise bad_type(name, value, "a JSON Schema")
    return Grammar(json_schema=value)


def _json_object(name: str, value: Any) -> Grammar | None:
    if value is False:
        return None
    if value is not True:
        raise bad_type(name, value, "true or false")
    return ANY_OBJECT


def _text_of(grammar_of: Callable[[str], Grammar]) -> Reader:
    def read(name: str, value: Any) -> Grammar | None:
        if not isinstance(value, str):
            raise bad_type(name, value, "a string")
        return grammar_of(value)

    return read


def _choice(name: str, value: Any) -> Grammar | None:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bad_type(name, value, "a list of strings")
    if not value:
        raise InvalidRequest.field(name, "[]", "must hold at least one option")
    return Grammar(choice=value)


def _structured_outputs(name: str, value: Any) -> Grammar | None:
    """vLLM's object with one of its kinds."""
    if not isinstance(value, dict):
        raise bad_type(name, value, "an object")
    inner = Body(value, f"{name}.")
    found = [
        grammar
        for kind, read in _KINDS.items()
        if (given := inner.raw(kind)) is not None
        and (grammar := read(f"{name}.{kind}", given)) is not None
    ]
    pattern = inner.text("whitespace_pattern")
    if inner.flag("disable_any_whitespace"):
        pattern = ""
    inner.finish()
    if len(found) != 1:
        raise InvalidRequest.field(name, "", f"must hold exactly one of {', '.join(_KINDS)}")
    return found[0] if pattern is None else _spaced(found[0], pattern)


def _spaced(grammar: Grammar, pattern: str) -> Grammar:
    """A schema whose output has white space that matches `pattern` between the tokens of JSON, by
    the keyword that llguidance adds to JSON Schema. Other grammars stay as they are."""
    if not isinstance(grammar.json_schema, str):
        return grammar
    try:
        schema = json.loads(grammar.json_schema)
    except (ValueError, RecursionError):
        return grammar  # the worker refuses it with the reason
    if not isinstance(schema, dict):
        return grammar
    return Grammar(json_schema={**schema, "x-guidance": {"whitespace_pattern": pattern}})


_KINDS: Mapping[str, Reader] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _text_of(lambda text: Grammar(regex=text)),
    "grammar": _text_of(lambda text: Grammar(ebnf=text)),
    "choice": _choice,
}
_FIELDS: Mapping[str, Reader] = {
    "response_format": _response_format,
    **{f"guided_{kind}": read for kind, read in _KINDS.items()},
    "structured_outputs": _structured_outputs,
}
