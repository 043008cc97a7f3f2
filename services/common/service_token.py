"""The secret that services show to each other: `authorization: Bearer <token>`."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from loraplex.errors import InvalidRequest, Unauthenticated
from services.common.callers import LOCAL, Caller
from services.common.env import SERVICE_TOKEN_FILE


class ServiceTokenAuth:
    """An `Auth` that lets in whoever knows the token."""

    def __init__(self, token: str) -> None:
        assert token, "an empty token would let everybody in"
        self._token = token.encode()

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Raises Unauthenticated unless the token is shown."""
        scheme, _, shown = metadata.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(shown.encode(), self._token):
            raise Unauthenticated("this door is for services that show the service token")
        return LOCAL


def read_service_token(path: Path | None) -> str:
    """The token, or "" without a file. Raises InvalidRequest when it cannot be read or is empty."""
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
