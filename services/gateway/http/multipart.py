"""Reads forms with one file (multipart/form-data) as they come in, without keeping the file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from loraplex.errors import DeadlineExceeded, InvalidRequest
from loraplex_services.common.limits import (
    MAX_FILE_BYTES,
    MAX_FILE_IDLE_S,
    MAX_FILE_S,
    MAX_FORM_PARTS,
    MAX_FORM_VALUE_BYTES,
)
from loraplex_services.gateway.batches.files import file_too_large

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # warnings quote the body

_FORM_BYTES = MAX_FORM_PARTS * (MAX_FORM_VALUE_BYTES + 4096)
"""Largest size of a form besides its file, in bytes."""
_MAX_FILENAME_CHARS = 255


@dataclass(slots=True)
class Form:
    """The fields of a form, and what its file was called and became."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    num_file_bytes: int = 0


Write = Callable[[AsyncGenerator[bytes]], Awaitable[int]]
"""Takes the bytes of the file, and returns their number."""


async def read_form(request: Request, write: Write) -> Form:
    """The form of a request, whose part `file` goes to `write`.

    Raises:
        InvalidRequest: it is no such form, is too large or has too many parts.
        DeadlineExceeded: the body takes too long to arrive.
    """
    media_type, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if media_type != b"multipart/form-data" or not boundary:
        raise InvalidRequest.field(
            "content-type",
            media_type.decode("latin-1")[:80],
            "files are sent as multipart/form-data with a boundary",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_FILE_BYTES + _FORM_BYTES:
        raise file_too_large()
    try:
        parts = _Parts(request, boundary)
    except FormParserError as error:
        raise _malformed(error) from None
    try:
        async with asyncio.timeout(MAX_FILE_S):
            return await _collected(parts, write)
    except TimeoutError:
        raise _too_slow(MAX_FILE_S) from None


async def _collected(parts: _Parts, write: Write) -> Form:
    form, has_file = Form(), False
    while (name := await parts.next_part()) is not None:
        if name == "file":
            if has_file:
                raise InvalidRequest.field("file", "", "is there twice; send one file")
            has_file = True
            form.filename = parts.filename[:_MAX_FILENAME_CHARS] or "file"
            form.num_file_bytes = await write(parts.content())
        else:
            form.fields[name] = await _value(name, parts)
    if not has_file:
        raise InvalidRequest.field("file", "", "the form has no file of this name")
    return form


async def _value(name: str, parts: _Parts) -> str:
    value = bytearray()
    async for data in parts.content():
        value += data
        if len(value) > MAX_FORM_VALUE_BYTES:
            why = f"is longer than {MAX_FORM_VALUE_BYTES} bytes"
            raise InvalidRequest.field(name[:80], "", why)
    return value.decode(errors="replace")


class _Kind(Enum):
    BEGIN = "begin"
    NAME = "name"
    VALUE = "value"
    HEADER = "header"
    READY = "ready"
    DATA = "data"
    END = "end"


class _Parts:
    """The parts of a body, one after another: `next_part`, then its `content`."""

    def __init__(self, request: Request, boundary: bytes) -> None:
        """Raises: FormParserError."""
        self._chunks = request.stream()
        self._events: list[tuple[_Kind, bytes]] = []
        """What the parser found in the last chunk and `_next` has not returned yet, last one first.
        """
        self._found: list[tuple[_Kind, bytes]] = []
        self._num_parts = 0
        self.filename = ""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": lambda: self._add(_Kind.BEGIN),
                "on_header_field": lambda data, start, end: self._add(_Kind.NAME, data[start:end]),
                "on_header_value": lambda data, start, end: self._add(_Kind.VALUE, data[start:end]),
                "on_header_end": lambda: self._add(_Kind.HEADER),
                "on_headers_finished": lambda: self._add(_Kind.READY),
                "on_part_data": lambda data, start, end: self._add(_Kind.DATA, data[start:end]),
                "on_part_end": lambda: self._add(_Kind.END),
            },
        )

    async def next_part(self) -> str | None:
        """The name of the next part; None after the last one."""
        name, header, value = "", bytearray(), bytearray()
        while (event := await self._next()) is not None:
            kind, data = event
            if kind is _Kind.BEGIN:
                self.filename = ""
            elif kind is _Kind.NAME:
                header += data
            elif kind is _Kind.VALUE:
                value += data
            elif kind is _Kind.HEADER:
                if header.lower() == b"content-disposition":
                    name = self._named(value)
                header, value = bytearray(), bytearray()
            elif kind is _Kind.READY:
                return name
        return None

    async def content(self) -> AsyncGenerator[bytes]:
        """The bytes of the part that `next_part` named."""
        while (event := await self._next()) is not None:
            kind, data = event
            if kind is _Kind.END:
                return
            yield data
        raise InvalidRequest("the form ends within a part", reason="INVALID_FORM")

    def _named(self, disposition: bytearray) -> str:
        options: dict[bytes, bytes]
        _, options = parse_options_header(disposition.decode("latin-1"))
        self.filename = options.get(b"filename", b"").decode(errors="replace")
        return options.get(b"name", b"").decode(errors="replace")

    def _add(self, kind: _Kind, data: bytes = b"") -> None:
        self._num_parts += kind is _Kind.BEGIN
        if self._num_parts > MAX_FORM_PARTS:
            raise InvalidRequest(
                f"the form has more than {MAX_FORM_PARTS} parts", reason="INVALID_FORM"
            )
        self._found.append((kind, data))

    async def _next(self) -> tuple[_Kind, bytes] | None:
        """The parser's next event; None at the end of the body."""
        while not self._events:
            try:
                async with asyncio.timeout(MAX_FILE_IDLE_S):
                    chunk = await anext(self._chunks, None)
            except TimeoutError:
                raise _too_slow(MAX_FILE_IDLE_S) from None
            if chunk is None:
                return None
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _malformed(error) from None
            self._events = self._found[::-1]
            self._found.clear()
        return self._events.pop()


def _malformed(error: FormParserError) -> InvalidRequest:
    """The error for a malformed form, without the library's message, which quotes the body."""
    why = f"the form is malformed ({type(error).__name__}); check its boundary"
    return InvalidRequest(why, reason="INVALID_FORM")


def _too_slow(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the body, or the next part of it, took longer than {limit_s} s to arrive",
        reason="BODY_TOO_SLOW",
    )
