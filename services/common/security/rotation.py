"""Notices that certificate files were replaced, as cert-manager does regularly.

The files are checked before a handshake or a new connection, so no thread is needed. Calls on open
connections continue.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

logger = logging.getLogger(__name__)

_NOT_YET_VALID, _EXPIRED = 9, 10
"""OpenSSL's numbers of the two errors."""


class Rotation:
    """The state of some PEM files as it was last used."""

    def __init__(self, ca: Path | None, *, pair: tuple[Path, Path] | None) -> None:
        """While the files cannot be used, as happens between two writes, or while the certificate
        is not valid, nothing counts as replaced.

        Args:
            ca: the certificates that peers are checked against.
            pair: a certificate and its key.
        """
        self._ca, self._pair = ca, pair
        self._files = (*(pair or ()), *((ca,) if ca is not None else ()))
        self._seen = self._stamp()
        self._refused = self._seen

    def is_renewed(self) -> bool:
        """True once after files were replaced by others that can be used."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        try:
            if self._ca is not None:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(self._ca)
            if self._pair is not None:
                check_pair(*self._pair)
                check_validity(*self._pair)
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


def check_pair(cert: Path, key: Path) -> None:
    """Raises: OSError (ssl.SSLError is one) unless the two are a certificate and its unencrypted
    key."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")


def check_validity(cert: Path, key: Path) -> None:
    """Raises: ssl.SSLCertVerificationError if the certificate has expired or is not valid yet.

    The standard library reads these times only for a handshake, so this is one, in memory, with a
    client that trusts the certificate itself.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server)
    callee = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (caller, callee, caller):
        try:
            end.do_handshake()
        except ssl.SSLError as error:  # also where an end waits for the other
            if getattr(error, "verify_code", None) in (_NOT_YET_VALID, _EXPIRED):
                raise


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """None if the file is missing, as it may be for a moment."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
