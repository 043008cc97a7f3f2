"""Reads forms with one file (multipart/form-data) as they come in, without keeping the file."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

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
        InvalidRequest: it is not such a form, is too large or has too many parts.
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
    while (part := await parts.next_part()) is not None:
        if part.name == "file":
            if has_file:
                raise InvalidRequest.field("file", "", "was sent twice; send one file")
            has_file = True
            form.filename = part.filename[:_MAX_FILENAME_CHARS] or "file"
            form.num_file_bytes = await write(parts.content())
        else:
            form.fields[part.name] = await _value(part.name, parts)
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


@dataclass(frozen=True, slots=True)
class _Part:
    """The head of a part."""

    name: str
    filename: str


class _Parts:
    """The parts of a body, one after another: `next_part`, then its `content`."""

    def __init__(self, request: Request, boundary: bytes) -> None:
        """Raises: FormParserError."""
        self._chunks = request.stream()
        self._events: deque[_Part | bytes | None] = deque()
        """Events of the parser that were not returned yet: the head of a part, its bytes, and None
        at its end."""
        self._num_parts = 0
        self._header, self._value = bytearray(), bytearray()
        """Name and value of the header that is being read."""
        self._part = _Part("", "")
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": lambda: self._events.append(self._part),
                "on_part_data": lambda data, start, end: self._events.append(data[start:end]),
                "on_part_end": lambda: self._events.append(None),
            },
        )

    async def next_part(self) -> _Part | None:
        """The head of the next part; None after the last one."""
        while await self._has_event():
            if isinstance(event := self._events.popleft(), _Part):
                return event
        return None

    async def content(self) -> AsyncGenerator[bytes]:
        """The bytes of the part that `next_part` returned."""
        while await self._has_event():
            event = self._events.popleft()
            if not isinstance(event, bytes):
                return
            yield event
        raise InvalidRequest("the form ends within a part", reason="INVALID_FORM")

    def _begin(self) -> None:
        self._part = _Part("", "")
        self._num_parts += 1
        if self._num_parts > MAX_FORM_PARTS:
            raise InvalidRequest(
                f"the form has more than {MAX_FORM_PARTS} parts; send fewer", reason="INVALID_FORM"
            )

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            options: dict[bytes, bytes]
            _, options = parse_options_header(self._value.decode("latin-1"))
            name, filename = (options.get(key, b"") for key in (b"name", b"filename"))
            self._part = _Part(name.decode(errors="replace"), filename.decode(errors="replace"))
        self._header.clear()
        self._value.clear()

    async def _has_event(self) -> bool:
        """Read on until the parser finds something; False at the end of the body."""
        while not self._events:
            try:
                async with asyncio.timeout(MAX_FILE_IDLE_S):
                    chunk = await anext(self._chunks, None)
            except TimeoutError:
                raise _too_slow(MAX_FILE_IDLE_S) from None
            if chunk is None:
                return False
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _malformed(error) from None
        return True


def _malformed(error: FormParserError) -> InvalidRequest:
    """The error for a malformed form, without the library's message, which quotes the body."""
    why = f"the form is malformed ({type(error).__name__}); check its boundary"
    return InvalidRequest(why, reason="INVALID_FORM")


def _too_slow(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the body, or the next part of it, took longer than {limit_s} s to arrive",
        reason="BODY_TOO_SLOW",
    )
