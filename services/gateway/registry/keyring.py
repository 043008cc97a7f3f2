"""Checks API keys with the registry and caches the results briefly.

A revoked key works for at most `FRESH_S` longer. A key in use is checked again before that, so that
requests do not wait for a busy registry. While the registry is unavailable, a key that was valid
when last checked stays valid until it expires, for at most one day.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from loraplex.api_keys import TOKEN
from loraplex.errors import LoraplexError, PermissionDenied, Unauthenticated
from loraplex_services.common.callers import Caller
from loraplex_services.common.limits import MAX_UNCHECKED_KEY_S
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.common.security.wrong_keys import WrongKeys
from loraplex_services.common.shared_work import SharedWork
from loraplex_services.gateway.clock import now_s

FRESH_S = 2.0
CHECK_AGAIN_S = 1.0
"""Age of an answer at which the registry is asked again while the answer is still used."""
MAX_KNOWN = 20_000
MAX_REFUSED = 5_000
_SCOPES_THAT_RUN = frozenset({"reader", "publisher", "admin", "root"})
_OPERATOR_METHODS = "/loraplex.v1.AdminService/"

KeyCheck = Callable[[str], Awaitable[Caller]]
"""Token -> caller. Raises Unauthenticated for a bad key, other errors if it cannot be checked."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The registry's last answer about a good key."""

    asked_s: float
    """When the registry was last asked."""
    answered_s: float
    """When the registry last answered."""
    caller: Caller


@dataclass(frozen=True, slots=True)
class _Refused:
    """The registry's last answer about a bad key. Its text, because an exception that is kept
    keeps the frames, and so the requests, that it was raised through."""

    asked_s: float
    message: str


class KeyRing:
    """Checks the callers of all APIs."""

    def __init__(
        self,
        check: KeyCheck,
        now: Callable[[], float] = now_s,
        unix_now: Callable[[], float] = time.time,
    ) -> None:
        self._check = check
        self._now = now
        self._unix_now = unix_now
        self._wrong_keys = WrongKeys(now)
        # By sha256 of the token, so that no secrets are kept. Anybody can invent bad keys; they
        # must not displace good ones.
        self._known: LruCache[bytes, _Known] = LruCache(MAX_KNOWN)
        self._refused: LruCache[bytes, _Refused] = LruCache(MAX_REFUSED)
        self._asking: SharedWork[bytes, Caller] = SharedWork()

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
            why = (
                "the API key is unknown: a key has the form lpx_<id>_<secret>"
                if authorization
                else "this gateway requires an API key: send 'Authorization: Bearer lpx_...', or "
                "set LORAPLEX_API_KEY for commands"
            )
            raise Unauthenticated(why, reason="INVALID_API_KEY")
        caller = await self._remembered(token.strip())
        if not caller.scopes & _SCOPES_THAT_RUN:
            raise PermissionDenied("this key may not run adapters; ask an admin for another")
        return caller

    async def _remembered(self, token: str) -> Caller:
        """Raises: Unauthenticated; ResourceExhausted for a peer that sent many wrong keys."""
        key = hashlib.sha256(token.encode()).digest()
        known, refused = self._known.get(key), self._refused.get(key)
        if known is not None and self._is_fresh(known.asked_s):
            if self._now() - known.asked_s > CHECK_AGAIN_S:
                self._asking.begin(key, lambda: self._asked(key, token))
            return self._unexpired(known.caller)
        if refused is not None and self._is_fresh(refused.asked_s):
            raise Unauthenticated(refused.message, reason="INVALID_API_KEY")
        if known is None:
            self._wrong_keys.check()
        return await self._asking.wait(key, lambda: self._asked(key, token))

    async def _asked(self, key: bytes, token: str) -> Caller:
        """Mutates: known, refused. Raises: Unauthenticated, or why the key cannot be checked."""
        known = self._known.get(key)
        try:
            caller = await self._check(token)
        except Unauthenticated as error:
            self._known.drop(key)
            self._refused.put(key, _Refused(self._now(), error.message))
            self._wrong_keys.count()
            raise Unauthenticated(error.message, reason="INVALID_API_KEY") from None
        except LoraplexError:
            if known is None or self._now() - known.answered_s > MAX_UNCHECKED_KEY_S:
                raise
            caller = self._unexpired(known.caller)
            self._known.put(key, _Known(self._now(), known.answered_s, caller))
            return caller
        self._known.put(key, _Known(self._now(), self._now(), caller))
        return caller

    def _unexpired(self, caller: Caller) -> Caller:
        """Returns the caller. Raises: Unauthenticated."""
        if caller.expires_unix_s and caller.expires_unix_s <= self._unix_now():
            raise Unauthenticated(
                f"the API key {caller.key_id} has expired; ask an admin for another",
                reason="INVALID_API_KEY",
            )
        return caller

    def _is_fresh(self, asked_s: float) -> bool:
        return self._now() - asked_s <= FRESH_S


def is_admin(caller: Caller) -> bool:
    """True if the caller may see the load of workers, which all tenants share."""
    return bool(caller.scopes & {"admin", "root"})


def sees_all_adapters(caller: Caller) -> bool:
    """True if the caller may see the adapters of all tenants: with the first admin key, or
    without auth."""
    return not caller.key_id or "root" in caller.scopes


def runs_all_adapters(caller: Caller) -> bool:
    """True if the caller may run the adapters of all tenants: with the first admin key. Without
    auth, a caller is the tenant `default`, which runs its own and those shared with it."""
    return "root" in caller.scopes


def require_admin(caller: Caller) -> None:
    """Raises: PermissionDenied."""
    if not is_admin(caller):
        raise PermissionDenied("this needs the scope 'admin'; ask an admin for another key")
