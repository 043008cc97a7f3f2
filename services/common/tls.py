"""The certificate of a service and the CA of its peers, for its doors and for its own calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from loraplex.errors import InvalidRequest
from services.common import env
from services.common.grpc_server import ServerTls


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; read when a door or a channel opens."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def proves_services(self) -> bool:
        """Whether a door with these files can tell services by their certificates."""
        return self.ca is not None and self.cert is not None

    def door(self, *, for_services: bool = False) -> ServerTls | None:
        """TLS of a door, None without a certificate.

        Args:
            for_services: with a CA, callers must show a certificate of it. Doors for people do not
                ask: they come with API keys.
        """
        if self.cert is None or self.key is None:
            return None
        return ServerTls(self.cert, self.key, self.ca if for_services else None)

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
    """From LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY.

    Raises:
        InvalidRequest: a file is missing, or one of certificate and key is.
    """
    ca, cert, key = (knob.read(environ) for knob in (env.CA, env.CERT, env.KEY))
    for knob, path in ((env.CA, ca), (env.CERT, cert), (env.KEY, key)):
        if path is not None and not path.is_file():
            raise InvalidRequest.field(knob.name, str(path), "is no file")
    if (cert is None) != (key is None):
        missing = env.CERT if cert is None else env.KEY
        raise InvalidRequest.field(missing.name, "", "certificate and key go together; name both")
    return TlsFiles(ca, cert, key)


def is_service(peer_names: Collection[str], allowed: Collection[str]) -> bool:
    """Whether a caller that showed a certificate with these names is a service of the house.

    Args:
        allowed: names that services have; empty = every certificate of the CA is one.
    """
    return bool(peer_names) and (not allowed or not set(allowed).isdisjoint(peer_names))
