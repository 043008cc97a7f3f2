"""Checks API keys with the registry, and caches the answers for a moment.

A revoked key works for at most `FRESH_S` longer. While the registry is unavailable, a key that was
valid when last checked stays valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from loraplex.api_keys import TOKEN
from loraplex.errors import LoraplexError, PermissionDenied, Unauthenticated
from services.common.callers import Caller
from services.gateway.event_loop import now_s

FRESH_S = 2.0
MAX_REMEMBERED = 100_000
_SCOPES_THAT_RUN = frozenset({"reader", "publisher", "admin", "root"})
_OPERATOR_METHODS = "/loraplex.v1.AdminService/"

KeyCheck = Callable[[str], Awaitable[Caller]]
"""Token -> caller. Raises Unauthenticated for a bad key, other errors if it cannot be checked."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The registry's last answer about a key."""

    asked_s: float
    answer: Caller | Unauthenticated


class KeyRing:
    """Checks the callers of all APIs."""

    def __init__(self, check: KeyCheck, now: Callable[[], float] = now_s) -> None:
        self._check = check
        self._now = now
        self._known: dict[bytes, _Known] = {}
        """By sha256 of the token, so that no secrets are kept."""

    async def check(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """The caller of a gRPC method. Raises: Unauthenticated, PermissionDenied."""
        caller = await self.caller(metadata.get("authorization", ""))
        if method.startswith(_OPERATOR_METHODS):
            require_admin(caller)
        return caller

    async def caller(self, authorization: str) -> Caller:
        """The caller behind an authorization header. Raises: Unauthenticated, PermissionDenied."""
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or not TOKEN.fullmatch(token.strip()):
            raise Unauthenticated(
                "send an API key as 'Authorization: Bearer lpx_...'", reason="INVALID_API_KEY"
            )
        caller = await self._remembered(token.strip())
        if not caller.scopes & _SCOPES_THAT_RUN:
            raise PermissionDenied("this key may not run adapters; ask an admin for another")
        return caller

    async def _remembered(self, token: str) -> Caller:
        """Mutates: known."""
        key = hashlib.sha256(token.encode()).digest()
        known = self._known.get(key)
        if known is None or self._now() - known.asked_s > FRESH_S:
            known = await self._asked(token, known)
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = known
        if isinstance(known.answer, Unauthenticated):
            raise known.answer
        return known.answer

    async def _asked(self, token: str, before: _Known | None) -> _Known:
        try:
            return _Known(self._now(), await self._check(token))
        except Unauthenticated as error:
            error.reason = "INVALID_API_KEY"
            return _Known(self._now(), error)
        except LoraplexError:
            if before is None or isinstance(before.answer, Unauthenticated):
                raise
            return _Known(self._now(), before.answer)


def is_admin(caller: Caller) -> bool:
    """True if the caller may see what concerns all tenants."""
    return bool(caller.scopes & {"admin", "root"})


def require_admin(caller: Caller) -> None:
    """Raises: PermissionDenied."""
    if not is_admin(caller):
        raise PermissionDenied("this needs a key with the scope 'admin'")
