"""What carries bytes is, on the wire, what the generated classes read and write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.chunk_wire import (
    Part,
    Piece,
    decode_part,
    decode_piece,
    encode_part,
    encode_piece,
)
from loraplex.v1 import registry_pb2 as pb

_DATA = st.one_of(st.binary(max_size=300), st.just(bytes(1 << 20)))
_PARTS = st.builds(
    pb.UploadPartRequest,
    upload_id=st.text(max_size=5),
    path=st.text(max_size=5),
    offset=st.integers(0, 2**64 - 1),
    data=_DATA,
    crc32=st.integers(0, 2**32 - 1),
)
_CHUNKS = st.builds(
    pb.FileChunk, path=st.text(max_size=5), offset=st.integers(0, 2**64 - 1), data=_DATA
)
_RESPONSES = st.one_of(
    st.builds(pb.DownloadAdapterResponse, chunk=_CHUNKS),
    st.just(pb.DownloadAdapterResponse(version=pb.AdapterVersion(name="a", labels={"k": "v"}))),
)


def _head(message: pb.UploadPartRequest) -> pb.UploadPartRequest:
    head = pb.UploadPartRequest()
    head.CopyFrom(message)
    head.ClearField("data")
    return head


@given(_PARTS)
def test_parts_are_written_and_read_as_by_protobuf(message: pb.UploadPartRequest) -> None:
    encoded = encode_part(Part(_head(message), message.data))
    assert pb.UploadPartRequest.FromString(encoded) == message
    part = decode_part(message.SerializeToString())
    assert part.head == _head(message)
    assert bytes(part.data) == message.data


@given(_RESPONSES)
def test_pieces_are_written_and_read_as_by_protobuf(message: pb.DownloadAdapterResponse) -> None:
    head = pb.DownloadAdapterResponse()
    head.CopyFrom(message)
    data = message.chunk.data
    if message.WhichOneof("part") == "chunk":
        head.chunk.ClearField("data")
    assert pb.DownloadAdapterResponse.FromString(encode_piece(Piece(head, data))) == message
    piece = decode_piece(message.SerializeToString())
    assert (piece.head, bytes(piece.data)) == (head, data)


def test_fields_of_newer_versions_are_passed_over() -> None:
    unknown = b"\x99\x06" + bytes(8) + b"\x9d\x06" + bytes(4) + b"\xa2\x06\x03new"
    message = pb.UploadPartRequest(path="a", offset=7, data=b"bytes")
    part = decode_part(unknown + message.SerializeToString() + unknown)
    assert (part.head.path, part.head.offset, bytes(part.data)) == ("a", 7, b"bytes")


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_read_as_by_protobuf_or_refused(message: bytes) -> None:
    try:
        expected = pb.UploadPartRequest.FromString(message)
    except Exception:
        expected = None
    try:
        part = decode_part(message)
    except Exception:
        return
    if expected is not None:
        assert bytes(part.data) == expected.data


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_message_cut_short_is_refused(cut: int) -> None:
    message = pb.UploadPartRequest(offset=300, data=b"ten bytes!").SerializeToString()
    with pytest.raises(ValueError, match="end"):
        decode_part(message[:-cut])
