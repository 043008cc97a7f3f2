"""Reads the files of a small adapter from the stream of one `PublishAdapter`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence

from loraplex.adapter_format import File
from loraplex.api.registry import MAX_ONE_CALL_BYTES
from loraplex.errors import InvalidRequest
from loraplex_services.registry.publish.metrics import RECEIVED_BYTES

_REQUEST_ID = re.compile("[0-9a-f]{16}")


def check_request_id(text: str) -> str:
    """Returns the id. Raises InvalidRequest."""
    if not _REQUEST_ID.fullmatch(text):
        raise InvalidRequest.field("request_id", text, "must be 16 lower-case hex characters")
    return text


async def contents_of(
    first: bytes,
    rest: AsyncIterator[bytes],
    files: Sequence[File],
) -> dict[str, bytes]:
    """The bytes of each file by its path. They are not compared with its sha256.

    Args:
        first: the bytes in the first message.
        rest: the bytes in each message after it.

    Raises:
        InvalidRequest: the files are too large for one call, or have another size than declared.
    """
    num_bytes = sum(file.size for file in files)
    if num_bytes > MAX_ONE_CALL_BYTES:
        description = f"at most {MAX_ONE_CALL_BYTES} in one call; use CreateUpload"
        raise InvalidRequest.field("files", f"{num_bytes} bytes", description)
    data = bytearray(first)
    while len(data) <= num_bytes:
        more = await anext(rest, None)
        if more is None:
            break
        data += more
    if len(data) != num_bytes:
        description = f"the files that were declared have {num_bytes}"
        raise InvalidRequest.field("data", f"{len(data)} bytes", description)
    RECEIVED_BYTES.inc(num_bytes)
    contents, view, offset = {}, memoryview(data), 0
    for file in files:
        contents[file.path] = bytes(view[offset : offset + file.size])
        offset += file.size
    return contents
