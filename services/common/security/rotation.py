"""Notices that certificate files were replaced, as cert-manager does regularly.

The files are checked before a handshake or a new connection, so no thread is needed. Calls on open
connections continue.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

logger = logging.getLogger(__name__)


class Rotation:
    """The state of some PEM files as it was last used."""

    def __init__(self, *files: Path | None, pair: tuple[Path, Path] | None) -> None:
        """
        Args:
            files: watched besides the pair; None are passed over.
            pair: a certificate and its key; while they do not belong together, as happens between
                two writes, nothing counts as replaced.
        """
        self._pair = pair
        self._files = (*(pair or ()), *(file for file in files if file is not None))
        self._seen = self._stamp()
        self._refused = self._seen

    def is_renewed(self) -> bool:
        """True once after files were replaced by others that can be used."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        try:
            if self._pair is not None:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._pair)
        except OSError as error:  # ssl.SSLError is one
            if stamp != self._refused:
                fields = {"cert": str(self._files[0]), "error": str(error)}
                logger.warning("new certificate cannot be used yet", extra=fields)
            self._refused = stamp
            return False
        self._seen = stamp
        logger.info("certificate renewed", extra={"cert": str(self._files[0])})
        return True

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """None if the file is missing, as it may be for a moment."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
