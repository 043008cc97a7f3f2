"""The messages that carry the bytes of files, on the wire with one copy instead of three.

protobuf copies the data of a message into an arena of its own and again out of it, under Python's
lock: about a third of what a transfer costs beside its hashes. Here it encodes all fields but
`data`, which is joined to them, or cut out of the received message, as fields may come in any
order. What is on the wire is what the generated classes write and read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from loraplex.v1 import registry_pb2 as pb

Data = bytes | memoryview

_PART_DATA = pb.UploadPartRequest.DESCRIPTOR.fields_by_name["data"].number
_RESPONSE_CHUNK = pb.DownloadAdapterResponse.DESCRIPTOR.fields_by_name["chunk"].number
_CHUNK_DATA = pb.FileChunk.DESCRIPTOR.fields_by_name["data"].number
_UPLOAD = "/loraplex.v1.RegistryService/UploadPart"
_DOWNLOAD = "/loraplex.v1.RegistryService/DownloadAdapter"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Part:
    """An UploadPartRequest."""

    head: pb.UploadPartRequest
    """Without its data."""
    data: Data


@dataclass(frozen=True, slots=True)
class Piece:
    """A DownloadAdapterResponse."""

    head: pb.DownloadAdapterResponse
    """Without the data of its chunk."""
    data: Data = b""


class ChunkStub:
    """The two methods that carry bytes, for `Channel.stub`."""

    def __init__(self, channel: Any) -> None:
        self.upload = channel.stream_unary(_UPLOAD, encode_part, pb.UploadPartResponse.FromString)
        self.download = channel.unary_stream(
            _DOWNLOAD, pb.DownloadAdapterRequest.SerializeToString, decode_piece
        )


def encode_part(part: Part) -> bytes:
    """The message on the wire."""
    return b"".join((part.head.SerializeToString(), _begin(_PART_DATA, len(part.data)), part.data))


def decode_part(message: bytes) -> Part:
    """A received message. Raises ValueError where it is none."""
    rest, data = _cut(memoryview(message), _PART_DATA)
    return Part(pb.UploadPartRequest.FromString(rest), data if data is not None else b"")


def encode_piece(piece: Piece) -> bytes:
    """The message on the wire."""
    if not piece.data:
        return piece.head.SerializeToString()
    chunk = piece.head.chunk.SerializeToString() + _begin(_CHUNK_DATA, len(piece.data))
    begin = _begin(_RESPONSE_CHUNK, len(chunk) + len(piece.data))
    return b"".join((begin, chunk, piece.data))


def decode_piece(message: bytes) -> Piece:
    """A received message. Raises ValueError where it is none."""
    rest, chunk = _cut(memoryview(message), _RESPONSE_CHUNK)
    head = pb.DownloadAdapterResponse.FromString(rest)
    if chunk is None:
        return Piece(head)
    fields, data = _cut(chunk, _CHUNK_DATA)
    head.chunk.SetInParent()
    head.chunk.MergeFromString(fields)
    return Piece(head, data if data is not None else b"")


def _begin(field: int, num_bytes: int) -> bytes:
    """What stands before the bytes of a field of such a type."""
    encoded = bytearray([field << 3 | _BYTES])
    while num_bytes > 0x7F:
        encoded.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    encoded.append(num_bytes)
    return bytes(encoded)


def _cut(message: memoryview, field: int) -> tuple[bytes, memoryview | None]:
    """The fields but one, and the bytes of that one (the last, where it comes more than once)."""
    rest, found = bytearray(), None
    position = 0
    while position < len(message):
        begin = position
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(message, position)
        elif kind == _BYTES:
            length, position = _varint(message, position)
            position += length
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"field {tag >> 3} is of no known type")
        if position > len(message):
            raise ValueError("the message ends within a field")
        if tag == field << 3 | _BYTES:
            found = message[position - length : position]
        else:
            rest += message[begin:position]
    return bytes(rest), found


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    while shift < 70 and position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number does not end")
