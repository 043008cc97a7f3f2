"""Output of commands: tables for people, JSON for scripts, errors for both."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from loraplex.errors import NOTE, LoraplexError, Violation, codes_of
from loraplex.printable import printable

if TYPE_CHECKING:
    from loraplex.api.output import ServedBy
    from loraplex.api.registry import AdapterVersion

T = TypeVar("T")

_NUMBERS = re.compile(r"[0-9]+")


def print_json(value: Any) -> None:
    """One object on one line of stdout. Dataclasses become objects. Scripts find `name`, `version`
    and `digest` in every object; they are null where it is about something else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    value = {"name": None, "version": None, "digest": None, **value}
    print(json.dumps(value, ensure_ascii=False, default=dataclasses.asdict), flush=True)


def show(value: Any, text: str, *, as_json: bool) -> None:
    """Print an object for scripts, or a text for people."""
    if as_json:
        print_json(value)
    else:
        print(text, flush=True)


def show_table(
    header: Sequence[str],
    values: Sequence[T],
    row: Callable[[T], Sequence[str]],
    *,
    as_json: bool,
    object_of: Callable[[T], Any] = lambda value: value,
) -> None:
    """Print an object of each value for scripts, or a table with a row of each for people."""
    if not as_json:
        print_table(header, [row(value) for value in values])
        if not values:
            print("nothing found", file=sys.stderr)
        return
    for value in values:
        print_json(object_of(value))


def about(version: AdapterVersion) -> dict[str, Any]:
    """The fields that objects about a version have in common."""
    names = ("name", "version", "digest", "tenant")
    return {name: getattr(version, name) for name in names}


def version_of(served_by: ServedBy | None) -> dict[str, Any]:
    """`name`, `version` and `digest` of the one adapter that answered, for `print_json`; only the
    name of the base if none did, and nothing if several did."""
    if served_by is None or len(served_by.adapters) > 1:
        return {}
    if not served_by.adapters:
        return {"name": served_by.base_id}
    name, _, version = served_by.adapters[0].rpartition(":v")
    tenant, _, short = name.rpartition("/")
    digest = served_by.digests[0]
    return {"name": short, "version": int(version), "digest": digest, "tenant": tenant}


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns under a header."""
    for line in table_lines(header, rows):
        print(line)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    table = [list(header), *(list(map(printable, row)) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def print_fields(fields: Mapping[str, str]) -> None:
    """One `name  value` line each; empty values are left out."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        if value:
            print(f"{name.ljust(width)}  {printable(value)}")


def print_warnings(warnings: Sequence[Violation]) -> None:
    """Print the warnings and notes of a validation to stderr."""
    for warning, line in _lines(warnings):
        kind = "" if warning.field == NOTE else "warning: "
        print(f"{kind}{line}", file=sys.stderr)


def print_error(error: LoraplexError, *, as_json: bool) -> None:
    """Print an error to stderr."""
    if not as_json:
        lines = [line for _, line in _lines(error.violations)]
        if len(lines) == 1:
            print(f"error: {lines[0]}", file=sys.stderr)
            return
        print(f"error: {printable(error.message)}", file=sys.stderr)
        for line in lines:
            print(f"  {line}", file=sys.stderr)
        return
    from google.rpc import code_pb2

    body = {
        "code": code_pb2.Code.Name(codes_of(error).grpc),
        "reason": error.reason,
        "message": error.message,
        "violations": [dataclasses.asdict(violation) for violation in error.violations],
    }
    print(json.dumps({"error": body}, ensure_ascii=False), file=sys.stderr)


def _lines(violations: Sequence[Violation]) -> list[tuple[Violation, str]]:
    """The first violation of each kind with its line, which says whether there are others. Those of
    one kind differ only in field, value and numbers, as those of many tensors do."""
    kinds: dict[str, list[Violation]] = {}
    for violation in violations:
        kinds.setdefault(_NUMBERS.sub("", violation.description), []).append(violation)
    more = " (and others of this kind: see --json)"
    return [(first, _line(first) + more * bool(others)) for first, *others in kinds.values()]


def _line(violation: Violation) -> str:
    """`field = value: description`; a value that only repeats the field, or its end after the name
    of a file, is left out."""
    repeats = f":{violation.field}".endswith(f":{violation.value}")
    value = f" = {violation.value}" if violation.value and not repeats else ""
    return printable(f"{violation.field}{value}: {violation.description}")


def sized(num_bytes: float) -> str:
    """`1.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def moment(unix_s: float) -> str:
    """Local date and time; "" for 0."""
    if not unix_s:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g} s after 1970"


def short_digest(digest: str) -> str:
    """The algorithm and the first twelve digits of a digest."""
    return digest[: len("sha256:") + 12]
