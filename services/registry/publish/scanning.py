"""Scans tensor values while they arrive, so that publishing need not read them again.

Whether all values of a file are finite depends on its bytes alone, so an answer is kept under the
sha256 of the file. It is only a shortcut: without an answer (another replica received the parts, a
file came in several parts, or it is damaged), inspection reads the stored bytes.
"""

from __future__ import annotations

from collections import OrderedDict

from loraplex.adapter_format import parse_header, prefix_bytes
from loraplex.adapter_format.safetensors_header import LENGTH_BYTES
from loraplex.adapter_format.tensor_scan import TensorScan
from loraplex.errors import InvalidAdapter

_MAX_KEPT = 1024


class Scans:
    """Results for files that arrived recently."""

    def __init__(self) -> None:
        self._zeros: OrderedDict[str, frozenset[str]] = OrderedDict()

    def zero_tensors(self, sha256: str) -> frozenset[str] | None:
        """Names of the all-zero tensors of a file whose values are all finite; None = not known."""
        return self._zeros.get(sha256)

    def remember(self, sha256: str, zero_tensors: frozenset[str]) -> None:
        """Keep a result; the oldest one is forgotten."""
        self._zeros[sha256] = zero_tensors
        if len(self._zeros) > _MAX_KEPT:
            self._zeros.popitem(last=False)


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
        if len(self._head) < prefix:
            return b""
        head = bytes(self._head)
        self._scan = TensorScan(parse_header(head[:prefix], self._file_size))
        self._head.clear()
        return head
