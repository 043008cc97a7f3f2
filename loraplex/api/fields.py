"""Copies between types whose fields have the same names."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def same_fields(record: Any, kind: Any) -> dict[str, Any]:
    """Values of a record or message by the fields of a dataclass, all of which it has as well."""
    return {name: getattr(record, name) for name in field_names(kind)}


def shared_fields(record: Any, kind: Any) -> dict[str, Any]:
    """Values of a dataclass's fields that another dataclass has under the same names."""
    names = field_names(kind)
    return {name: getattr(record, name) for name in field_names(record.__class__) if name in names}


@functools.cache
def field_names(kind: Any) -> tuple[str, ...]:
    """The names of a dataclass's fields, in order."""
    return tuple(each.name for each in dataclasses.fields(kind))
