"""The caller of a request: set by the auth check of a server, read by its handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from loraplex.refs import DEFAULT_TENANT

ALL_SCOPES = frozenset({"reader", "publisher", "admin"})
ROOT = "root"
"""Scope of the first admin key, and of a registry's callers without auth. It owns every tenant."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity behind one call."""

    tenant: str
    key_id: str
    """Id of the API key; "" without auth."""
    scopes: frozenset[str]
    """Among "reader", "publisher", "admin" and `ROOT`."""
    expires_unix_s: float = 0.0
    """When the API key expires; 0 = never."""


LOCAL = Caller(DEFAULT_TENANT, "", ALL_SCOPES)
"""Every caller, if the server listens on loopback without auth."""

current_caller: ContextVar[Caller] = ContextVar("current_caller", default=LOCAL)


peer_names: ContextVar[tuple[str, ...]] = ContextVar("peer_names", default=())
"""Names in the certificate that the caller of the current call showed and TLS verified."""


note_read: ContextVar[Callable[[int], None]] = ContextVar("note_read", default=lambda _: None)
"""Is called with the number of documents that a handler has read for its caller. A call that reads
many counts as several calls."""


class Auth(Protocol):
    """Decides about every call of a gRPC server before its handler runs."""

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """The caller of `/package.Service/Method`.

        Args:
            metadata: request metadata with text values, keys in lower case.

        Raises:
            Unauthenticated: no key, or a bad one.
            PermissionDenied: a good key without the scope.
        """
        ...
