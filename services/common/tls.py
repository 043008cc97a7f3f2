"""The certificate of a service and the CA of its peers, for its servers and its calls."""

from __future__ import annotations

import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from loraplex.errors import InvalidRequest
from loraplex_services.common import env
from loraplex_services.common.grpc_server import ServerTls
from loraplex_services.common.rotation import Rotation
from loraplex_services.common.setting import Setting


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
        """Tells when they were replaced."""
        pair = (self.cert, self.key) if self.cert is not None and self.key is not None else None
        return Rotation(self.ca, pair=pair)

    def channel(self) -> grpc.ChannelCredentials | None:
        """Credentials to call other services with, None without a CA: they are called in plain."""
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
        InvalidRequest: a file is missing, or one of certificate and key is.
    """
    return TlsFiles(_file(environ, env.CA), *_pair(environ, env.CERT, env.KEY))


def http_tls_files(environ: Mapping[str, str]) -> TlsFiles:
    """TLS files that LORAPLEX_HTTP_CERT and LORAPLEX_HTTP_KEY name.

    Raises:
        InvalidRequest: a file is missing, one of the two is, or they do not belong together.
    """
    cert, key = _pair(environ, env.HTTP_CERT, env.HTTP_KEY)
    if cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        except ssl.SSLError as error:
            raise InvalidRequest.field(
                env.HTTP_CERT.name,
                str(cert),
                f"is no PEM certificate of the key in {env.HTTP_KEY.name} ({error.reason})",
            ) from None
    return TlsFiles(cert=cert, key=key)


def _pair(
    environ: Mapping[str, str], of_cert: Setting[Path | None], of_key: Setting[Path | None]
) -> tuple[Path | None, Path | None]:
    cert, key = _file(environ, of_cert), _file(environ, of_key)
    if (cert is None) != (key is None):
        missing = of_cert if cert is None else of_key
        raise InvalidRequest.field(
            missing.name, "", "a certificate and its key go together; set both"
        )
    return cert, key


def _file(environ: Mapping[str, str], setting: Setting[Path | None]) -> Path | None:
    path = setting.read(environ)
    if path is not None and not path.is_file():
        raise InvalidRequest.field(setting.name, str(path), "is not a file")
    return path


def is_service(peer_names: Collection[str], allowed: Collection[str]) -> bool:
    """Whether a caller that showed a certificate with these names is a service of the house.

    Args:
        allowed: names that services have; empty = every certificate of the CA is one.
    """
    return bool(peer_names) and (not allowed or not set(allowed).isdisjoint(peer_names))
