"""Images that a rank of another machine reads from rank 0."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.errors import DataLoss
from loraplex_services.worker.adapters.pack.image import (
    ImageFile,
    ImageIndex,
    PackedAdapter,
)
from loraplex_services.worker.runner.parallel.remote_images import ImageSender, RemoteBytes

DATA = bytes(range(256)) * 40_000
COPY = 7


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    """The file that rank 0 has, and the rank's end of the connection."""
    path = tmp_path / "image"
    index = ImageIndex("layout", num_pages=3, num_bytes=len(DATA), sites=[])
    PackedAdapter(index, memoryview(DATA)).write(path)
    ours, theirs = socket.socketpair()
    sender = ImageSender(ours, 1, lambda copy_id: path if copy_id == COPY else None)
    with theirs:
        yield path, theirs
    sender.close()


def read(path: Path, content: RemoteBytes | None) -> tuple[ImageIndex, bytes]:
    """Index and extents, in buffers of uneven sizes."""
    buffers = [bytearray(1), bytearray(5_000_000), bytearray(len(DATA) - 5_000_001)]
    with ImageFile(path, content) as image:
        image.read_into([memoryview(buffer) for buffer in buffers])
        image.check("layout")
        return image.index, b"".join(buffers)


def test_an_image_arrives_as_it_is_on_disk(far):
    path, end = far
    found = read(Path("elsewhere"), RemoteBytes(end, COPY))
    assert found == read(path, None)
    assert found[1] == DATA


def test_an_image_that_is_gone_or_belongs_to_no_copy_fails_that_copy_only(far):
    path, end = far
    with pytest.raises(FileNotFoundError):
        read(path, RemoteBytes(end, COPY + 1))
    moved = path.rename(path.with_name("moved"))
    with pytest.raises(FileNotFoundError):
        read(path, RemoteBytes(end, COPY))
    moved.rename(path)
    assert read(path, RemoteBytes(end, COPY))[1] == DATA


def test_an_image_that_is_cut_short_is_refused(far):
    path, end = far
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataLoss, match="cut short"):
        read(path, RemoteBytes(end, COPY))


def test_a_rank_whose_rank_0_has_gone_does_not_wait(far):
    path, end = far
    end.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError):
        read(path, RemoteBytes(end, COPY))
