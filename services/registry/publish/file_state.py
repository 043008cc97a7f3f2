"""How much of a file of an upload is stored: the parts that cover it from its first byte on."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class FileState:
    """How much of a file is stored."""

    file: File
    parts: tuple[UploadPart, ...]
    """Parts that cover the committed bytes, in order; each may begin before the end of the last."""
    committed_bytes: int

    @property
    def complete(self) -> bool:
        return self.committed_bytes == self.file.size

    def segments(self) -> list[Segment]:
        """The committed bytes as segments of parts."""
        segments, position = [], 0
        for part in self.parts:
            skip = position - part.offset
            segments.append(Segment(part.key, skip, part.size - skip, whole=skip == 0))
            position = part.offset + part.size
        return segments

    @property
    def known_sha256(self) -> str:
        """The sha256 of the content if one part holds all of it; else ""."""
        single = len(self.parts) == 1 and self.parts[0].size == self.file.size
        return self.parts[0].sha256 if single else ""


def state_of(file: File, parts: list[UploadPart]) -> FileState:
    """Choose the parts that reach furthest from byte 0 on without a gap."""
    chosen: list[UploadPart] = []
    position = 0
    while position < file.size:
        reaching = [part for part in parts if part.offset <= position]
        best = max(reaching, key=lambda part: part.offset + part.size, default=None)
        if best is None or best.offset + best.size <= position:
            break
        chosen.append(best)
        position = best.offset + best.size
    return FileState(file, tuple(chosen), position)
