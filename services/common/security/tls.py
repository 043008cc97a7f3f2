"""The certificate of a service and the CA of its peers, for its servers and its calls."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from loraplex.errors import InvalidRequest
from loraplex_services.common.grpc.server import ServerTls
from loraplex_services.common.security.rotation import Rotation, check_pair, check_validity
from loraplex_services.common.settings import env
from loraplex_services.common.settings.setting import Setting

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. Servers read them again when they were replaced, channels when they are opened."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def proves_services(self) -> bool:
        """Whether a server with these files can tell services by their certificates."""
        return self.ca is not None and self.cert is not None

    def server(self, *, for_services: bool = False) -> ServerTls | None:
        """TLS of a server, None without a certificate.

        Args:
            for_services: with a CA, callers must show a certificate of it. People come with
                API keys instead.
        """
        if self.cert is None or self.key is None:
            return None
        return ServerTls(self.cert, self.key, self.ca if for_services else None)

    def rotation(self) -> Rotation:
        """Notices when the files were replaced."""
        pair = (self.cert, self.key) if self.cert is not None and self.key is not None else None
        return Rotation(self.ca, pair=pair)

    def channel(self) -> grpc.ChannelCredentials | None:
        """Credentials to call other services with; None without a CA, where calls are not
        encrypted."""
        if self.ca is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca.read_bytes(),
            private_key=self.key.read_bytes() if self.key else None,
            certificate_chain=self.cert.read_bytes() if self.cert else None,
        )


PLAIN = TlsFiles()


def tls_files(environ: Mapping[str, str]) -> TlsFiles:
    """TLS files that LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY name.

    Raises:
        InvalidRequest: a file is missing or cannot be used, or one of certificate and key is
            missing.
    """
    cert, key = _file(environ, env.CERT), _file(environ, env.KEY)
    if (cert is None) != (key is None):
        missing = env.CERT if cert is None else env.KEY
        raise InvalidRequest.field(
            missing.name, "", "a certificate and its key go together; set both"
        )
    ca = _file(environ, env.CA)
    # gRPC would only report that it cannot listen.
    if ca is not None:
        with _named(env.CA, ca, "must be a PEM certificate"):
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(ca)
    if cert is not None and key is not None:
        with _named(env.CERT, cert, f"must be a PEM certificate, and {key} its unencrypted key"):
            check_pair(cert, key)
        _warn_if_invalid(cert, key)
    return TlsFiles(ca, cert, key)


def http_tls_files(environ: Mapping[str, str]) -> TlsFiles:
    """TLS files of the HTTP server: LORAPLEX_HTTP_CERT and its key, in the same file or next to it.

    A Kubernetes Secret has the two as `tls.crt` and `tls.key` in one folder.

    Raises:
        InvalidRequest: the file is missing, or there is no key that belongs to it.
    """
    cert = _file(environ, env.HTTP_CERT)
    if cert is None:
        return PLAIN
    key_file = cert.with_suffix(".key")
    key = key_file if key_file.is_file() else cert
    needed = f"must be a PEM certificate whose unencrypted key is in the same file or in {key_file}"
    with _named(env.HTTP_CERT, cert, needed):
        check_pair(cert, key)
    _warn_if_invalid(cert, key)
    return TlsFiles(cert=cert, key=key)


def _warn_if_invalid(cert: Path, key: Path) -> None:
    """Only a warning, because callers that do not check the certificate can still be served."""
    try:
        check_validity(cert, key)
    except ssl.SSLCertVerificationError as error:
        fields = {"cert": str(cert), "error": error.verify_message}
        logger.warning("callers will not accept the certificate", extra=fields)


@contextmanager
def _named(setting: Setting[Path | None], path: Path, needed: str) -> Iterator[None]:
    """Raises InvalidRequest naming the setting for a file that cannot be read or used."""
    try:
        yield
    except OSError as error:  # ssl.SSLError is one
        why = getattr(error, "reason", None) or error.strerror or error
        raise InvalidRequest.field(setting.name, str(path), f"{needed} ({why})") from None


def _file(environ: Mapping[str, str], setting: Setting[Path | None]) -> Path | None:
    path = setting.read(environ)
    if path is not None and not path.is_file():
        raise InvalidRequest.field(setting.name, str(path), "is not a file")
    return path


def is_service(peer_names: Collection[str], allowed: Collection[str]) -> bool:
    """Whether a caller with a certificate for these names is one of our services.

    Args:
        allowed: names that services have; empty = every certificate of the CA is one.
    """
    return bool(peer_names) and (not allowed or not set(allowed).isdisjoint(peer_names))
