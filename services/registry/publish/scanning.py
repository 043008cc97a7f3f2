"""Scans tensor values while they arrive, so that publishing need not read them again.

Whether all values of a file are finite depends on its bytes alone, so an answer is kept under the
sha256 of the file. It is only a shortcut: without an answer (another replica received the parts, a
file came in several parts, or it is damaged), inspection reads the stored bytes.
"""

from __future__ import annotations

from loraplex.adapter_format import parse_header, prefix_bytes
from loraplex.adapter_format.safetensors_header import LENGTH_BYTES
from loraplex.adapter_format.tensor_scan import TensorScan
from loraplex.errors import InvalidAdapter
from loraplex_services.common.lru_cache import LruCache

_MAX_KEPT_BYTES = 16 << 20
_ENTRY_BYTES = 512
_NAME_BYTES = 128
"""Approximate size of an entry, and of the name of a tensor in it, apart from its characters."""
_MAX_HEADER_BYTES = 1 << 20
"""Larger headers, of more than 7,000 tensors, are not parsed here: while one is, which takes a
tenth of a second for each MiB, other threads hardly run. Their files are scanned when they are
published, after a process has parsed the header."""


class Scans:
    """Results for files that arrived recently."""

    def __init__(self) -> None:
        self._zeros: LruCache[str, frozenset[str]] = LruCache(_MAX_KEPT_BYTES)

    def zero_tensors(self, sha256: str) -> frozenset[str] | None:
        """Names of the all-zero tensors of a file whose values are all finite; None = not known."""
        return self._zeros.get(sha256)

    def remember(self, sha256: str, zero_tensors: frozenset[str]) -> None:
        """Keep a result. Older results may be forgotten for it."""
        names_bytes = sum(_NAME_BYTES + len(name) for name in zero_tensors)
        self._zeros.put(sha256, zero_tensors, _ENTRY_BYTES + names_bytes)


class ArrivingScan:
    """The scan of one tensor file from its first byte. Silently gives up on a malformed file."""

    def __init__(self, file_size: int) -> None:
        self._file_size = file_size
        self._head = bytearray()
        self._scan: TensorScan | None = None
        self._gave_up = False

    def feed(self, chunk: bytes | memoryview) -> None:
        """Scan the next bytes."""
        if self._gave_up:
            return
        try:
            if self._scan is None:
                chunk = self._begin(chunk)
            if self._scan is not None:
                self._scan.feed(chunk)
        except InvalidAdapter:
            self._gave_up = True

    def finish(self) -> frozenset[str] | None:
        """Names of the all-zero tensors once all bytes have arrived; None without an answer."""
        if self._scan is None or self._gave_up:
            return None
        try:
            return self._scan.finish()
        except InvalidAdapter:
            return None

    def _begin(self, chunk: bytes | memoryview) -> bytes:
        """Collect the header and start scanning after it; returns all bytes so far."""
        self._head += chunk
        if len(self._head) < min(LENGTH_BYTES, self._file_size):
            return b""
        prefix = prefix_bytes(bytes(self._head[:LENGTH_BYTES]), self._file_size)
        if prefix > _MAX_HEADER_BYTES:
            self._gave_up = True
            self._head.clear()
            return b""
        if len(self._head) < prefix:
            return b""
        head = bytes(self._head)
        self._scan = TensorScan(parse_header(head[:prefix], self._file_size))
        self._head.clear()
        return head
