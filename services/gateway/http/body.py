"""Reads the typed fields of a JSON body; a wrong type is a 400 that names the field.

A field that is not read is refused unless its value is null or the default of the field, so that no
setting is ignored unnoticed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Any

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.common.limits import FILE_LIFETIME_S, MAX_RESPONSE_METADATA, check_chars

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "verbosity"),
    }
)
"""Fields of OpenAI's own that change nothing here, except that user and prompt_cache_key choose the
target of a split."""

DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "async": (False,),
    "audio": (),
    "beam_width": (1,),
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "detokenize": (True,),
    "disable_additional_properties": (False,),
    "disable_fallback": (False, True),
    "defer_loading": (False,),
    "documents": ([],),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "extra_args": ({},),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "output_mode": ("tokens",),
    "padding": (False,),
    "parallel_tool_calls": (True, False),
    "skip_reading_prefix_cache": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "watermarking": (False,),
}
"""Values of unsupported fields that have no effect, and are therefore accepted."""

_NAMES_AN_ADAPTER = frozenset({"lora_path", "lora_request", "adapter_id", "adapter_source"})
"""Fields with which clients of SGLang, vLLM, LoRAX and TGI choose an adapter. Without them, a
request would run on the base."""

Schema = Mapping[str, Any]
"""A JSON Schema."""
ANYTHING: Schema = {}
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
TOKEN_IDS: Schema = {"type": "array", "items": INTEGER}

reads: ContextVar[list[tuple[Body, str, Schema]] | None] = ContextVar("reads", default=None)
"""If set, every field that a body is asked for is added, so that a parser's reads become the schema
of its bodies."""

_MAX_SHOWN_CHARS = 24
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        InvalidRequest: it is not one, or a field has half a surrogate pair, which JSON can escape
            but valid Unicode cannot contain. The error then names the field.
    """
    try:
        text = raw.decode("utf-8-sig")
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not valid JSON", reason="INVALID_JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", reason="INVALID_JSON")
    if _ESCAPED_SURROGATE.search(text):
        for name, value in fields.items():
            _check_unicode(name, value)
    return fields


def _check_unicode(name: str, value: object) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        shown = name.encode(errors="replace").decode()
        why = "the text holds half a surrogate pair; send valid Unicode"
        raise InvalidRequest.field(shown, "", why) from None


class Body:
    """A JSON object whose fields are read one by one."""

    def __init__(self, fields: dict[str, Any], prefix: str = "") -> None:
        """`prefix` is put before the names of fields in errors."""
        self.prefix = prefix
        self._left = {name: value for name, value in fields.items() if value is not None}

    def text(self, name: str) -> str | None:
        """A string field."""
        value = self.raw(name, STRING)
        if value is not None and not isinstance(value, str):
            raise bad_type(self.prefix + name, value, "a string")
        return value

    def metadata(self) -> dict[str, str]:
        """The field `metadata` of an object that is kept."""
        value = self.raw("metadata", ANYTHING)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise bad_type("metadata", value, "an object of strings")
        if len(value) > MAX_RESPONSE_METADATA:
            why = f"at most {MAX_RESPONSE_METADATA} entries"
            raise InvalidRequest.field("metadata", len(value), why)
        for key, text in value.items():
            check_chars("metadata", key, 64)
            check_chars("metadata", text, 512)
        return value

    def lifetime(self, name: str) -> int:
        """Seconds from `{"anchor": "created_at", "seconds": N}`; by default the longest."""
        inner = self.inner(name, "an object with anchor and seconds")
        if inner is None:
            return int(FILE_LIFETIME_S.most)
        anchor, seconds = inner.text("anchor"), inner.integer("seconds")
        inner.finish()
        if anchor != "created_at":
            raise InvalidRequest.field(f"{name}.anchor", anchor or "", "must be created_at")
        return int(FILE_LIFETIME_S.check(f"{name}.seconds", seconds or 0))

    def inner(self, name: str, expected: str = "an object") -> Body | None:
        """The fields of an object; None if it is absent."""
        value = self.raw(name, {"type": "object"})
        if value is None:
            return None
        if not isinstance(value, dict):
            raise bad_type(self.prefix + name, value, expected)
        return Body(value, f"{self.prefix}{name}.")

    def integer(self, name: str) -> int | None:
        """An integer field; true and false are refused."""
        value = self.raw(name, INTEGER)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise bad_type(self.prefix + name, value, "an integer")
        return value

    def count(self, name: str) -> int | None:
        """An integer field that may also be true, which means 1, or false, which means none."""
        value = self.raw(name, {"type": ["integer", "boolean"]})
        if isinstance(value, bool):
            return int(value) or None
        if value is not None and not isinstance(value, int):
            raise bad_type(self.prefix + name, value, "an integer")
        return value

    def number(self, name: str) -> float | None:
        """A number field."""
        value = self.raw(name, {"type": "number"})
        return None if value is None else _float(self.prefix + name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean field."""
        value = self.raw(name, {"type": "boolean", "default": default})
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_type(self.prefix + name, value, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of token ids."""
        value = self.raw(name, TOKEN_IDS)
        if value is None:
            return ()
        if not are_ids(value):
            raise bad_type(self.prefix + name, value, "a list of token ids")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self.raw(name, {"type": ["string", "array"], "items": STRING})
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise bad_type(self.prefix + name, value, "a string or a list of strings")
        return tuple(items)

    def bias(self, name: str) -> dict[int, float]:
        """An object from token id to number."""
        numbers = {"type": "object", "additionalProperties": {"type": "number"}}
        value = self.raw(name, numbers)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad_type(self.prefix + name, value, "an object from token id to number")
        for key in value:
            if not _is_integer_text(key):
                shown = key[:_MAX_SHOWN_CHARS]
                raise InvalidRequest.field(
                    self.prefix + name, shown, f"the key {shown!r} is not a token id"
                )
        biases = {int(key): _float(self.prefix + name, bias) for key, bias in value.items()}
        if len(biases) < len(value):
            raise InvalidRequest.field(self.prefix + name, "", "names a token twice")
        return biases

    def named(self, names: Collection[str]) -> dict[str, Any]:
        """The fields of these names that the body has, for the caller to check."""
        found = {name: self.raw(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def finish(self) -> None:
        """Refuse the fields that were not read. Raises: Unsupported naming the field."""
        for name, value in self._left.items():
            if name not in IGNORED and value not in DEFAULTS.get(name, ()):
                why = "this field is unknown or not served with this value; leave it out"
                if name in _NAMES_AN_ADAPTER:
                    why = "this field is not served; put the name of the adapter into model"
                raise Unsupported.field(self.prefix + name, "", why)

    def raw(self, name: str, schema: Schema = ANYTHING) -> Any:
        """A field that the caller checks; None if it is absent or null."""
        if (log := reads.get()) is not None:
            log.append((self, name, schema))
        return self._left.pop(name, None)


def are_ids(value: object) -> bool:
    """True for a list of integers, none of them a boolean. Takes 20 ms for a million."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def bad_type(name: str, value: object, expected: str) -> InvalidRequest:
    """The error shows only the type, because the value may be the user's text."""
    return InvalidRequest.field(name, _type_name(value), f"must be {expected}")


def _float(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise bad_type(name, value, "a number")


def _is_integer_text(key: object) -> bool:
    return isinstance(key, str) and key.removeprefix("-").isdecimal() and len(key) < 20


def _type_name(value: object) -> str:
    names = {str: "string", int: "integer", float: "number", bool: "boolean", list: "list"}
    return names.get(type(value), "object")
