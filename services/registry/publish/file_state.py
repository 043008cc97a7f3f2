"""How much of a file of an upload is stored: the parts that have arrived so far, in any order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.adapter_format import File
from loraplex_services.common.objects import Segment


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A stored range of bytes of one file."""

    key: str
    offset: int
    size: int
    sha256: str

    @property
    def end(self) -> int:
        return self.offset + self.size


class FileState:
    """How much of a file is stored."""

    def __init__(self, file: File, parts: Iterable[UploadPart]) -> None:
        self.file = file
        self._parts = sorted(parts, key=lambda part: (part.offset, -part.size))

    @property
    def committed_bytes(self) -> int:
        """Bytes from the first one on that are stored without a gap."""
        return self.gap(0)[0]

    @property
    def complete(self) -> bool:
        return self.committed_bytes == self.file.size

    def gap(self, offset: int) -> tuple[int, int]:
        """The first bytes from `offset` on that are not stored, [begin, end)."""
        begin = offset
        for part in self._parts:
            if part.offset > begin:
                return begin, part.offset
            begin = max(begin, part.end)
        return begin, self.file.size

    def segments(self) -> list[Segment]:
        """The committed bytes as segments of parts."""
        segments, position = [], 0
        for part in self._parts:
            skip = position - part.offset
            if skip < 0:
                break
            if part.end > position:
                segments.append(Segment(part.key, skip, part.size - skip, whole=skip == 0))
                position = part.end
        return segments

    @property
    def known_sha256(self) -> str:
        """The sha256 of the content if one part holds all of it; else ""."""
        first = self._parts[0] if self._parts else None
        return first.sha256 if first is not None and first.size == self.file.size else ""
