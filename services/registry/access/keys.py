"""Stores API keys (`lpx_<id>_<secret>`) as hashes; the secret is shown once."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import time
from collections.abc import Sequence
from pathlib import Path

from loraplex.api_keys import TOKEN, draw_key, token_of
from loraplex.errors import AlreadyExists, InvalidRequest, NotFound, Unauthenticated
from loraplex.refs import DEFAULT_TENANT
from loraplex_services.common import documents
from loraplex_services.common.callers import ROOT, Caller, note_read
from loraplex_services.common.limits import KEY_LIFETIME_S, MAX_DESCRIPTION_CHARS, check_chars
from loraplex_services.common.lru_cache import LruCache
from loraplex_services.common.objects import ObjectStore
from loraplex_services.common.settings import env
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import EVERYTHING, Access
from loraplex_services.registry.records import KeyRecord, now_s

SCOPES = ("reader", "publisher", "admin")
CACHE_S = 2.0
"""A revoked key is refused at most this long after its revocation."""
MAX_CACHED = 20_000
_BATCH_KEYS = 200
_MAX_READ = 2000
"""Keys after which a page ends."""
_MAX_ID_CHARS = 64
_FIRST_SCOPES = (*SCOPES, ROOT)
_FIRST = "first admin key"


class Keys:
    """Creates, checks, lists and revokes keys."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._cache: LruCache[str, tuple[float, KeyRecord]] = LruCache(MAX_CACHED)
        self._unknown: LruCache[str, float] = LruCache(MAX_CACHED)
        """When an id was last looked up in vain. Anybody can invent ids; they must not displace
        known keys."""
        self._creating_first = asyncio.Lock()

    async def create(
        self, tenant: str, scopes: Sequence[str], ttl_s: float, description: str
    ) -> tuple[KeyRecord, str]:
        """A new key and its token. Raises InvalidRequest for unknown scopes, a lifetime
        that is not finite or out of range, or a long description."""
        scopes = _checked_scopes(scopes)
        KEY_LIFETIME_S.check("ttl_s", ttl_s)
        check_chars("description", description, MAX_DESCRIPTION_CHARS)
        return await self._created(tenant, scopes, ttl_s, description)

    async def create_first(self) -> tuple[KeyRecord, str]:
        """The first admin key and its token; it may act for every tenant.

        Raises:
            AlreadyExists: there is one already, even if it was revoked.
        """
        async with self._creating_first:
            # Not `read_intact`: a damaged record may be the first key's.
            keys = await documents.read_folder(self._store, layout.KEYS, KeyRecord)
            if any(ROOT in record.scopes for record in keys):
                raise AlreadyExists(
                    "the first admin key exists already; create others with it, or put a new one "
                    "into the file LORAPLEX_ADMIN_KEY_FILE and restart the registry",
                    reason="ADMIN_KEY_EXISTS",
                )
            return await self._created(DEFAULT_TENANT, _FIRST_SCOPES, 0.0, _FIRST)

    async def _created(
        self, tenant: str, scopes: Sequence[str], ttl_s: float, description: str
    ) -> tuple[KeyRecord, str]:
        created_s = now_s()
        key_id, secret = draw_key()
        record = KeyRecord(
            key_id=key_id,
            tenant=tenant,
            scopes=tuple(scopes),
            secret_sha256=_hash(secret),
            created_s=created_s,
            expires_s=created_s + ttl_s if ttl_s else 0.0,
            description=description,
        )
        await documents.create(self._store, layout.key(key_id), record)
        return record, token_of(key_id, secret)

    async def page(
        self, tenant: str, page_size: int, after: str = ""
    ) -> tuple[list[KeyRecord], str]:
        """Keys ordered by id, and the id after which the next page begins; "" on the last page.

        Damaged records are logged and left out, so that one does not hide all others. A page may be
        short, or empty, because it ends after a number of keys of all tenants.

        Args:
            tenant: tenant of the keys; "" = all tenants.
            after: id of the last key of the previous page.

        Raises:
            InvalidRequest: `after` cannot be a key's id.
        """
        if after and not _is_id(after):
            description = "is not a page token of this list; start again without one"
            raise InvalidRequest.field("page_token", after[:80], description)
        found: list[KeyRecord] = []
        names: list[str] = []
        num_read = 0
        start = layout.key(after) if after else ""
        async for item in self._store.list_objects(layout.KEYS, start):
            names.append(item.key)
            if len(names) == _BATCH_KEYS:
                found += await self._of_tenant(names, tenant)
                num_read += len(names)
                names.clear()
            if len(found) > page_size:
                break
            if num_read >= _MAX_READ and not names and _is_id(layout.key_id_of(item.key)):
                return found, layout.key_id_of(item.key)
        else:
            found += await self._of_tenant(names, tenant)
        has_more = len(found) > page_size
        return found[:page_size], found[page_size - 1].key_id if has_more else ""

    async def _of_tenant(self, names: Sequence[str], tenant: str) -> Sequence[KeyRecord]:
        records = await documents.read_intact(self._store, names, KeyRecord)
        note_read.get()(len(names))
        return [record for record in records if tenant in ("", record.tenant)]

    async def get(self, key_id: str, access: Access = EVERYTHING) -> KeyRecord:
        """The record of a key. Raises NotFound, also for the key of a tenant that `access` does not
        own, so as not to reveal whose it is."""
        record = None
        if _is_id(key_id):
            record = await documents.read(self._store, layout.key(key_id), KeyRecord)
        if record is None or not access.owns(record.tenant):
            why = "no such key of your tenant; 'registry keys list' shows all of them"
            raise NotFound.field("key_id", key_id[:40], why)
        return record

    async def revoke(self, key_id: str, access: Access = EVERYTHING) -> KeyRecord:
        """Make a key invalid everywhere within `CACHE_S`. Raises as `get` does."""
        await self.get(key_id, access)

        def step(current: KeyRecord | None) -> KeyRecord | None:
            assert current is not None, "keys are never removed"
            if current.revoked_s:
                return None
            generation = current.generation + 1
            return dataclasses.replace(current, revoked_s=now_s(), generation=generation)

        record = await documents.change(self._store, layout.key(key_id), KeyRecord, step)
        assert record is not None, "keys are never removed"
        self._cache.drop(key_id)
        return record

    def remembers(self, token: str) -> bool:
        """Whether a key of this id was read a short time ago."""
        match = TOKEN.fullmatch(token)
        return match is not None and self._cache.get(match[1]) is not None

    async def check(self, token: str) -> Caller:
        """The caller that holds a token.

        Raises:
            Unauthenticated: it is malformed, unknown, expired or revoked.
        """
        match = TOKEN.fullmatch(token)
        record = await self._cached(match[1]) if match else None
        if match is None or record is None:
            raise Unauthenticated("the API key is unknown; check LORAPLEX_API_KEY")
        if not hmac.compare_digest(record.secret_sha256, _hash(match[2])):
            raise Unauthenticated("the API key is unknown; check LORAPLEX_API_KEY")
        return _valid(record)

    async def check_id(self, key_id: str) -> Caller:
        """The caller that holds a key, whose token was checked before.

        Raises:
            Unauthenticated: it is unknown, expired or revoked.
        """
        record = await self._cached(key_id) if _is_id(key_id) else None
        if record is None:
            raise Unauthenticated("the API key is unknown")
        return _valid(record)

    async def admit_first_admin(self, path: Path) -> None:
        """Make the token in a file the first admin key; it may act for every tenant.

        Raises:
            InvalidRequest: the file cannot be read or holds no token.
        """
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise InvalidRequest.field(
                env.ADMIN_KEY_FILE.name, str(path), f"cannot be read: {error.strerror}"
            ) from None
        match = TOKEN.fullmatch(token)
        if match is None:
            description = (
                "must contain a key lpx_<id>_<secret> with a secret of at least 16 characters"
            )
            raise InvalidRequest.field(env.ADMIN_KEY_FILE.name, str(path), description)

        def step(current: KeyRecord | None) -> KeyRecord | None:
            hashed = _hash(match[2])
            if current is not None and current.secret_sha256 == hashed:
                return None
            generation = current.generation + 1 if current is not None else 1
            return KeyRecord(
                match[1], DEFAULT_TENANT, _FIRST_SCOPES, hashed, now_s(), generation=generation,
                description=_FIRST,
            )  # fmt: skip

        await documents.change(self._store, layout.key(match[1]), KeyRecord, step)

    async def _cached(self, key_id: str) -> KeyRecord | None:
        fresh_from_s = time.monotonic() - CACHE_S
        read_s, record = self._cache.get(key_id) or (float("-inf"), None)
        if read_s >= fresh_from_s:
            return record
        if (self._unknown.get(key_id) or float("-inf")) >= fresh_from_s:
            return None
        record = await documents.read(self._store, layout.key(key_id), KeyRecord)
        if record is None:
            self._unknown.put(key_id, time.monotonic())
        else:
            self._cache.put(key_id, (time.monotonic(), record))
        return record


def _valid(record: KeyRecord) -> Caller:
    """The holder of a key. Raises: Unauthenticated."""
    if record.revoked_s:
        raise Unauthenticated(f"the API key {record.key_id} was revoked; use another")
    if record.expires_s and record.expires_s <= now_s():
        raise Unauthenticated(f"the API key {record.key_id} has expired; ask an admin for another")
    return Caller(record.tenant, record.key_id, frozenset(record.scopes))


def _is_id(text: str) -> bool:
    return len(text) <= _MAX_ID_CHARS and text.isalnum() and text.isascii()


def _checked_scopes(scopes: Sequence[str]) -> tuple[str, ...]:
    """The scopes, each of them once."""
    if not scopes:
        raise InvalidRequest.field("scopes", "[]", f"give one or more of {', '.join(SCOPES)}")
    if unknown := {*scopes} - {*SCOPES}:
        raise InvalidRequest.field("scopes", min(unknown), f"must be one of {', '.join(SCOPES)}")
    return tuple(dict.fromkeys(scopes))


def _hash(secret: str) -> str:
    """Secrets have at least 96 random bits, so a plain hash is safe against search."""
    return hashlib.sha256(secret.encode()).hexdigest()
