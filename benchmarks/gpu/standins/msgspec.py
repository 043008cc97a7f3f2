"""The part of msgspec that a runner uses, for machines where nothing can be installed.

`all.sh` puts this folder on the path where the library is missing. Structs are dataclasses, and
bytes are JSON: images written with it are read with it only.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
import json
import types
import typing
from typing import Any

DecodeError = ValueError


@typing.dataclass_transform(frozen_default=True)
class Struct:
    """A dataclass; other options of the real one say how it is encoded."""

    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **_: object) -> None:
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict):
                factory = dataclasses.field(default_factory=default.copy)
                setattr(cls, name, factory)
            elif dataclasses.is_dataclass(default):
                setattr(cls, name, dataclasses.field(default_factory=lambda value=default: value))
        dataclasses.dataclass(frozen=frozen, kw_only=kw_only)(cls)


def _built(kind: Any, value: Any) -> Any:
    """Plain JSON as `kind`: a struct, a named tuple, a list or tuple of them, or what JSON has."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _built(hints[name], part) for name, part in value.items()})
    if origin in (list, tuple):
        return origin(_built(arguments[0], part) for part in value)
    if hasattr(kind, "_fields"):
        return kind(*value)
    if kind is bytes and isinstance(value, str):
        return base64.b64decode(value)
    return value


class _Decoder:
    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def decode(self, raw: bytes) -> Any:
        return _built(self._kind, json.loads(raw))


def _encode(value: Any) -> bytes:
    return json.dumps(dataclasses.asdict(value), default=_text).encode()


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


msgpack = types.SimpleNamespace(Decoder=_Decoder, Encoder=object, encode=_encode)
structs = types.SimpleNamespace(replace=dataclasses.replace)
