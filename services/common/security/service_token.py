"""Authentication between services: by a certificate (mTLS) or by a shared secret.

The secret travels as `authorization: Bearer <token>`. Its file may contain several tokens, one per
line. The first is sent and all are accepted, so that the token can be changed without downtime.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from pathlib import Path

from loraplex.errors import InvalidRequest, Unauthenticated
from loraplex_services.common.callers import LOCAL, Caller, peer_names
from loraplex_services.common.security.tls import is_service
from loraplex_services.common.settings.env import SERVICE_TOKEN_FILE


class ServiceAuth:
    """An `Auth` that admits services: callers with a service's certificate or the token."""

    def __init__(self, token: str, names: Collection[str] = ()) -> None:
        """`token` is what `read_service_token` gave; `names` are those of services' certificates,
        empty = any that TLS accepted."""
        self._token = token
        self._names = frozenset(names)

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Raises Unauthenticated unless the caller is a service."""
        if is_service(peer_names.get(), self._names):
            return LOCAL
        scheme, _, shown = metadata.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not is_service_token(shown, self._token):
            raise Unauthenticated(
                "only services may call this: show the service token or a service's certificate"
            )
        return LOCAL


def is_service_token(shown: str, token: str) -> bool:
    """Whether `shown` is one of the lines of the token file."""
    return any(hmac.compare_digest(shown.encode(), known.encode()) for known in token.split())


def read_service_token(path: Path | None) -> str:
    """The tokens, one per line, or "" without a file.

    Raises:
        InvalidRequest: the file cannot be read or is empty.
    """
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise InvalidRequest.field(
            SERVICE_TOKEN_FILE.name, str(path), f"cannot be read: {error.strerror}"
        ) from None
    if not token:
        raise InvalidRequest.field(SERVICE_TOKEN_FILE.name, str(path), "the file is empty")
    return token
