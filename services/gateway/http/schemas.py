"""Makes JSON Schemas of bodies: of requests from their parsers, of responses from types."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

from loraplex.api.sampling import RANGES
from loraplex.errors import LoraplexError
from loraplex_services.gateway.http.body import DEFAULTS, IGNORED, Body, Schema, reads

Parse = Callable[[dict[str, Any]], object]
_STEP = re.compile(r"([^.\[\]]+)|(\[\d+\])")
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def request_schema(parse: Parse, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of the bodies that a parser takes, found by running it.

    Args:
        parse: reads a body by means of `Body`.
        examples: bodies that it takes, and that together have every object it looks into.

    Fields of the body itself are complete, because the parser refuses others. Objects within may
    have further fields.
    """
    root: dict[str, Any] = {"type": "object", "properties": {}}
    always: set[str] | None = None
    for example in examples:
        log: list[tuple[Body, str, Schema]] = []
        token = reads.set(log)
        try:
            parse(copy.deepcopy(dict(example)))
        finally:
            reads.reset(token)
        _add(root, log)
        needed = {name for name in example if _is_refused(parse, example, name)}
        always = needed if always is None else always & needed
    properties: dict[str, Any] = root["properties"]
    for name in IGNORED - properties.keys():
        properties[name] = {"description": "Changes nothing."}
    for name, values in DEFAULTS.items():
        if values:
            properties.setdefault(name, {"enum": list(values)})
    required = sorted(always or ())
    root["properties"] = {
        name: _with_nulls(properties[name], itself=name not in required)
        for name in sorted(properties)
    }
    return {**root, "required": required, "additionalProperties": False}


def response_schema(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type. Those of TypedDicts are added to `components` and referred to."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [response_schema(arg, components) for arg in args]}
    if origin in (list, Sequence):
        return {"type": "array", "items": response_schema(args[0], components)}
    if origin is dict:
        return {"type": "object", "additionalProperties": response_schema(args[1], components)}
    kind = origin or kind
    name = "".join(arg.__name__ for arg in args) + kind.__name__
    if name not in components:
        components[name] = {}  # It may contain itself.
        components[name] = _of_typed_dict(kind, args, components)
    return {"$ref": f"#/components/schemas/{name}"}


def _of_typed_dict(kind: Any, args: Sequence[Any], components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a TypedDict, which is generic if there are `args`."""
    values = dict(zip(kind.__parameters__ if args else (), args, strict=True))
    properties, required = {}, []
    for name, field in get_type_hints(kind, include_extras=True).items():
        if get_origin(field) is NotRequired:
            (field,) = get_args(field)
        elif name in kind.__required_keys__:
            required.append(name)
        if values and getattr(field, "__parameters__", None):
            field = field[tuple(values[each] for each in field.__parameters__)]
        properties[name] = response_schema(field, components)
    about = (kind.__doc__ or "").strip()
    shape = {"type": "object", "properties": properties, "required": required}
    return {**({"description": about} if about else {}), **shape, "additionalProperties": False}


def _add(root: dict[str, Any], log: Iterable[tuple[Body, str, Schema]]) -> None:
    """Add one run's reads. The body that was read first is the request's."""
    properties: dict[str, Any] = root["properties"]
    first: Body | None = None
    for body, name, schema in log:
        first = first or body
        if body is first:
            known = properties.setdefault(name, {})
        elif not body.prefix:
            # The same request as a chat: it knows the types of the fields that are passed on.
            known = properties.get(name)
            if known is None or known:
                continue
        else:
            parent = _within(properties, body.prefix)
            if parent is None:
                continue
            known = parent.setdefault("properties", {}).setdefault(name, {})
        known.update({key: value for key, value in schema.items() if key not in known})
        if "type" in schema and (limits := RANGES.get(name)) is not None:
            least = "exclusiveMinimum" if limits.excludes_least else "minimum"
            known.update({least: limits.least, "maximum": limits.most})


def _within(properties: dict[str, Any], prefix: str) -> dict[str, Any] | None:
    """The schema of the object whose fields have a prefix such as `adapters[0].`."""
    node: dict[str, Any] | None = None
    for name, index in _STEP.findall(prefix):
        if index:
            assert node is not None, prefix
            node = node.setdefault("items", {})
        elif node is None:
            if (node := properties.get(name)) is None:
                return None
        else:
            node = node.setdefault("properties", {}).setdefault(name, {})
    return node


def _is_refused(parse: Parse, example: Mapping[str, Any], name: str) -> bool:
    """Whether a body without a field is refused."""
    try:
        parse(copy.deepcopy({field: value for field, value in example.items() if field != name}))
    except LoraplexError:
        return True
    return False


def _with_nulls(schema: Mapping[str, Any], *, itself: bool) -> dict[str, Any]:
    """A schema that also allows null, which means that a field is absent, for all fields within
    and, if wanted, for the field itself."""
    changed = dict(schema)
    if "properties" in changed:
        needed = changed.get("required", ())
        changed["properties"] = {
            name: _with_nulls(value, itself=name not in needed)
            for name, value in changed["properties"].items()
        }
    if "items" in changed:
        changed["items"] = _with_nulls(changed["items"], itself=False)
    if itself and "type" in changed:
        kinds = changed["type"]
        changed["type"] = [*([kinds] if isinstance(kinds, str) else kinds), "null"]
    if itself and "anyOf" in changed:
        changed["anyOf"] = [*changed["anyOf"], {"type": "null"}]
    if itself and "enum" in changed:
        changed["enum"] = [*changed["enum"], None]
    return changed
