"""Copies between types whose fields have the same names."""

from __future__ import annotations

import dataclasses
from typing import Any


def same_fields(record: Any, kind: type[Any]) -> dict[str, Any]:
    """Values of a record or message by the fields of a dataclass, all of which it has as well."""
    return {each.name: getattr(record, each.name) for each in dataclasses.fields(kind)}


def shared_fields(record: Any, kind: type[Any]) -> dict[str, Any]:
    """Values of a dataclass's fields that another dataclass has under the same names."""
    names = {each.name for each in dataclasses.fields(kind)}
    return {
        each.name: getattr(record, each.name)
        for each in dataclasses.fields(record)
        if each.name in names
    }
