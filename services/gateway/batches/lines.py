"""The lines of a batch job's input: JSON objects with custom_id, method, url and body."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from loraplex_services.common.limits import HTTP_BODY, MAX_CUSTOM_ID_CHARS
from loraplex_services.gateway.batches.files import Files
from loraplex_services.gateway.batches.records import BatchError, BatchRecord

_LINE = re.compile(rb"([^\r\n]+)[\r\n]*")
"""A line with the empty lines that follow it, each of which a search would otherwise look at."""
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a request, or what is wrong with it."""

    index: int
    """Index of the line, from 0 on; empty lines do not count."""
    custom_id: str | None = None
    body: dict[str, Any] | None = None
    error: BatchError | None = None


@asynccontextmanager
async def input_lines(
    files: Files, record: BatchRecord
) -> AsyncGenerator[AsyncGenerator[bytes | None]]:
    """The raw lines of a batch job's input. Raises: NotFound if it is gone."""
    # An expired file still has its bytes while a batch job may read it.
    file = await files.get(record.tenant, record.input_file_id, even_expired=True)
    async with (
        aclosing(files.read(file)) as chunks,
        aclosing(split_lines(chunks, HTTP_BODY.max_message_bytes)) as lines,
    ):
        yield lines


async def split_lines(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes | None]:
    """The lines of a file that are not empty; None for each that is longer than `max_bytes`."""
    rest, is_too_long = b"", False
    async for chunk in chunks:
        if is_too_long:
            _, newline, chunk = chunk.partition(b"\n")
            if not newline:
                continue
            is_too_long = False
            yield None
        complete, newline, rest = (rest + chunk).rpartition(b"\n")
        for line in _lines_of(complete):
            yield line if len(line) <= max_bytes else None
        if len(rest) > max_bytes + 1:  # perhaps with the CR of its end
            rest, is_too_long = b"", True
    if is_too_long:
        yield None
    for line in _lines_of(rest):
        yield line if len(line) <= max_bytes else None


def _lines_of(data: bytes) -> Iterator[bytes]:
    """The lines that are not empty."""
    return (match[1] for match in _LINE.finditer(data.strip(b"\r\n")))


class CustomIds:
    """The custom_ids of the lines of a batch job, kept as digests: the ids themselves may take 100
    MB, their digests 5 MB."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, custom_id: str) -> bool:
        """Returns False if it was added before."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        num_before = len(self._digests)
        self._digests.add(digest)
        return len(self._digests) > num_before


def read_line(index: int, fields: dict[str, Any], endpoint: str) -> Line:
    """The request of a parsed line."""
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return wrong_line(index, "missing_custom_id", "custom_id must be a text", None)
    if len(custom_id) > MAX_CUSTOM_ID_CHARS:
        why = f"custom_id has more than {MAX_CUSTOM_ID_CHARS} characters"
        return wrong_line(index, "invalid_custom_id", why, None)
    if unknown := [name for name in fields if name not in _FIELDS]:
        why = f"{unknown[0][:40]!r} is unknown; a line has {', '.join(_FIELDS)}"
        return wrong_line(index, "unknown_field", why, custom_id)
    if fields.get("method") != "POST":
        return wrong_line(index, "invalid_method", "method must be POST", custom_id)
    if fields.get("url") != endpoint:
        why = f"url must be the endpoint of the batch job, {endpoint}"
        return wrong_line(index, "mismatched_url", why, custom_id)
    body = fields.get("body")
    if not isinstance(body, dict):
        return wrong_line(index, "missing_body", "body must be an object", custom_id)
    return Line(index, custom_id, body)


class _Named(msgspec.Struct):
    custom_id: str


def custom_id_of(raw: bytes | None) -> str | None:
    """The custom_id of a raw line that is not sent; None if it has none."""
    try:
        named = msgspec.json.decode(raw or b"", type=_Named)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return named.custom_id if 0 < len(named.custom_id) <= MAX_CUSTOM_ID_CHARS else None


def wrong_line(index: int, code: str, why: str, custom_id: str | None) -> Line:
    """A line that is no request."""
    error = BatchError(code, f"request {index + 1} of the file: {why}")
    return Line(index, custom_id, error=error)
