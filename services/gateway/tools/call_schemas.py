"""Makes JSON Schemas of calls from the schemas of the functions' arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import MAX_GRAMMAR_CHARS

SPACING = {"x-guidance": {"whitespace_pattern": " ?"}}
"""An extension of llguidance: models write calls on one line with single spaces."""
_ROOT = "root"


def one_call(schemas: Mapping[str, dict[str, Any]], key: str) -> dict[str, Any]:
    """Schema of `{"name", key}`; each function's schema keeps its own $defs.

    Args:
        schemas: of the arguments of each function, by name.
        key: name of the property that contains the arguments.
    """
    _check_size(schemas)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{definition}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for definition, name in enumerate(schemas)
    ]
    defs = {str(n): _moved(schema, str(n)) for n, schema in enumerate(schemas.values())}
    return {"anyOf": calls, "$defs": defs, **SPACING}


def list_of_calls(
    schemas: Mapping[str, dict[str, Any]], key: str, *, is_parallel: bool
) -> dict[str, Any]:
    """Schema of a list of at least one such call, at most one unless `is_parallel`."""
    call = one_call(schemas, key)
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": call.pop("anyOf")}, **call}
    return schema if is_parallel else schema | {"maxItems": 1}


def argument(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Schema of one argument of a function, complete with its definitions."""
    _check_size(schema)
    pointer = name.replace("~", "~0").replace("/", "~1")
    reference = f"#/$defs/{_ROOT}/properties/{pointer}"
    return {"$ref": reference, "$defs": {_ROOT: _moved(schema, _ROOT)}, **SPACING}


def check_grammar_chars(num_chars: int) -> None:
    """Raises: InvalidRequest if a grammar has too many characters.

    Grammars are made on the event loop, and copy a schema for each of its arguments.
    """
    if num_chars > MAX_GRAMMAR_CHARS:
        why = f"their schemas make a grammar of more than {MAX_GRAMMAR_CHARS} characters"
        raise InvalidRequest.field("grammar", "", f"{why}; send fewer or smaller ones")


def _check_size(schema: Any) -> None:
    """Raises: InvalidRequest for a schema that alone makes a grammar too long."""
    check_grammar_chars(len(json.dumps(schema)))


def _moved(schema: Any, definition: str) -> Any:
    """A schema with references adjusted to its new position as a definition of another schema."""
    if isinstance(schema, list):
        return [_moved(item, definition) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, definition) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{definition}{reference[1:]}"
    return moved
