"""The image of an adapter: an index of its tiles, and the bytes of its extents in the arena.

    magic (8) · length of the index (8) · sha256 of all that follows (32) · index · zeros · extents

The index is msgpack; the extents begin at a multiple of 64 bytes, and the last one ends with its
last tile. To load an image, it is only copied. No torch.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from loraplex.errors import DataLoss
from loraplex_services.worker.adapters.pack.tiles import ImageTile
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.sites import Slice

MAGIC = b"lpximg01"
_LENGTH_BYTES, _HASH_BYTES = 8, 32
_INDEX_BEGIN = len(MAGIC) + _LENGTH_BYTES + _HASH_BYTES
MAX_INDEX_BYTES = 256 << 20
ALIGN_BYTES = 64
CHECK_BYTES = 1 << 20
"""Bytes that are read and hashed at a time."""
MAX_BUFFERS = 1024
"""Most buffers of one system call."""


class PackedRole(msgspec.Struct, frozen=True, array_like=True):
    """The tiles of one matrix of a site."""

    role: str
    """Value of a `site_plan.Role`."""
    dtype: str
    """safetensors name."""
    tiles: list[ImageTile]
    """The tiles, in rows and columns of the whole matrix."""


class PackedSite(msgspec.Struct, frozen=True, array_like=True):
    """An adapter at one site."""

    site_id: int
    slices: list[Slice]
    roles: list[PackedRole]
    row_ids: list[int]
    """Rows of the weight that it replaces, ascending; of an embedding or head, token ids."""
    num_rows: int = 0
    """Tokens of its own table, where they are not as many as the base's."""
    factors: list[float] = []
    """Factors of A and B together, by rank row, if they are integers; else none."""


class PackedRecords(msgspec.Struct, frozen=True, array_like=True):
    """`ops.lora.device_records.AdapterRecords`, which count from the image's extents."""

    index: bytes = b""
    data: bytes = b""
    relocations: bytes = b""
    sites: list[int] = []
    """Site ids that the records describe."""
    sites_without: list[int] = []
    """Sites whose parts kernels on a GPU do not apply: embeddings, norms, replaced rows."""


class ImageIndex(msgspec.Struct, frozen=True, array_like=True):
    """The position of every part of an image."""

    fingerprint: str
    """Fingerprint of the layout that it was packed for."""
    num_pages: int
    """Pages of all extents, see `types.extents`."""
    num_bytes: int
    """Size of all extents up to the end of the last tile."""
    sites: list[PackedSite]
    facts: AdapterFacts = AdapterFacts()
    records: PackedRecords = PackedRecords()


_decode = msgspec.msgpack.Decoder(ImageIndex).decode


class Image(Protocol):
    """An image that can be copied into an arena."""

    @property
    def index(self) -> ImageIndex: ...

    @property
    def sha256(self) -> bytes:
        """The hash in its head, which identifies the bytes."""
        ...

    def read_into(self, buffers: Sequence[memoryview], begin: int = 0) -> None:
        """Fill writable byte buffers, one after another, from byte `begin` of the extents on.
        Several threads may call this at once.

        Raises:
            DataLoss: fewer bytes are there.
        """
        ...


class PackedAdapter:
    """An image in memory."""

    def __init__(self, index: ImageIndex, data: memoryview) -> None:
        """`data`: `index.num_bytes` bytes."""
        assert data.nbytes == index.num_bytes, (data.nbytes, index.num_bytes)
        self.index = index
        self._data = data

    def read_into(self, buffers: Sequence[memoryview], begin: int = 0) -> None:
        """As `Image` says."""
        for buffer in buffers:
            buffer[:] = self._data[begin : begin + buffer.nbytes]
            begin += buffer.nbytes

    @property
    def sha256(self) -> bytes:
        """As `Image` says."""
        hasher = hashlib.sha256()
        for part in self._tail():
            hasher.update(part)
        return hasher.digest()

    def _tail(self) -> tuple[bytes, bytes, memoryview]:
        """Everything that the hash covers: index, zeros, extents."""
        index = msgspec.msgpack.encode(self.index)
        return index, bytes(-(_INDEX_BEGIN + len(index)) % ALIGN_BYTES), self._data

    def write(self, path: Path) -> None:
        """Write the file, which appears at `path` complete or not at all."""
        tail = self._tail()
        head = MAGIC + len(tail[0]).to_bytes(_LENGTH_BYTES, "little") + self.sha256
        scratch = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with scratch.open("wb") as target:
                for part in (head, *tail):
                    target.write(part)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


class ImageBytes(Protocol):
    """The bytes of an image's file, wherever it is."""

    def read(self, buffers: Sequence[memoryview], position: int) -> int:
        """Fill the buffers from `position` on, as `os.preadv` does, from any thread. Returns how
        many bytes there were, 0 = the file has ended. Raises OSError if there is no file."""
        ...

    def close(self) -> None:
        """The bytes are not needed any longer."""
        ...


class LocalBytes:
    """A file of this machine, read without the GIL."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, buffers: Sequence[memoryview], position: int) -> int:
        """See `ImageBytes`."""
        return os.preadv(self._file, buffers, position)

    def close(self) -> None:
        """See `ImageBytes`."""
        os.close(self._file)


class ImageFile:
    """The image in a file; to be closed. Raises DataLoss if it is not one, OSError if none is. Its
    index is read when it is asked for."""

    def __init__(self, path: Path, content: ImageBytes | None = None) -> None:
        """`content`: of the file; None = it is on this machine."""
        self._path = path
        self._content = content or LocalBytes(path)
        try:
            head = self._range(0, _INDEX_BEGIN)
            length = int.from_bytes(head[len(MAGIC) :][:_LENGTH_BYTES], "little")
            if not head.startswith(MAGIC) or length > MAX_INDEX_BYTES:
                self._refuse("is not an image of this version")
            self.sha256 = head[-_HASH_BYTES:]
            self._index_bytes = length
            self._begin = _INDEX_BEGIN + length
            self._begin += -self._begin % ALIGN_BYTES
        except BaseException:
            self._content.close()
            raise

    def _range(self, begin: int, num_bytes: int) -> bytes:
        """Bytes of the file; fewer if it has ended."""
        data = bytearray(num_bytes)
        count = self._content.read([memoryview(data)], begin)
        return bytes(data[:count])

    @cached_property
    def index(self) -> ImageIndex:
        """See `Image`. Raises DataLoss if it is damaged."""
        try:
            return _decode(self._range(_INDEX_BEGIN, self._index_bytes))
        except msgspec.DecodeError:
            self._refuse("has a damaged index")

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._content.close()

    def read_into(self, buffers: Sequence[memoryview], begin: int = 0) -> None:
        """See `Image`: one copy, from the page cache or the network into the buffers."""
        position = self._begin + begin
        for first in range(0, len(buffers), MAX_BUFFERS):
            part = buffers[first : first + MAX_BUFFERS]
            position = self._read(part, position)

    def _read(self, buffers: Sequence[memoryview], position: int) -> int:
        rest = [buffer for buffer in buffers if buffer.nbytes]
        while rest:
            count = self._content.read(rest, position)
            if not count:
                self._refuse("is cut short")
            position += count
            while rest and count >= rest[0].nbytes:
                count -= rest.pop(0).nbytes
            if count:
                rest[0] = rest[0][count:]
        return position

    def check(self, fingerprint: str) -> None:
        """Raises DataLoss unless every byte is as it was written, for this layout."""
        if self.index.fingerprint != fingerprint:
            self._refuse("was packed for another layout")
        hasher, position = hashlib.sha256(), _INDEX_BEGIN
        while data := self._range(position, CHECK_BYTES):
            hasher.update(data)
            position += len(data)
        if hasher.digest() != self.sha256:
            self._refuse("does not match its hash")

    def _refuse(self, reason: str) -> NoReturn:
        raise DataLoss(f"the packed image {self._path.name} {reason}")


def image_path(folder: Path, fingerprint: str) -> Path:
    """Where an adapter's folder has its image for a layout."""
    return folder / f"image-{fingerprint}"


def images_in(folder: Path) -> list[Path]:
    """Images for any layout."""
    return sorted(folder.glob("image-*"))
