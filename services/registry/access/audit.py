"""The audit log: one immutable object per change, written before the change is acknowledged."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from loraplex.errors import InvalidRequest
from loraplex_services.common.callers import note_read
from loraplex_services.common.documents import encode, intact
from loraplex_services.common.objects import After, ObjectStore
from loraplex_services.common.ulid import first_ulid, time_of_ulid, ulid
from loraplex_services.registry import layout
from loraplex_services.registry.index.gathering import RequestBatcher
from loraplex_services.registry.records import AuditRecord, VersionRecord, now_s

_KEY = re.compile(layout.AUDIT + r"\d{4}-\d{2}-\d{2}/[0-9a-hjkmnp-tv-z]{26}\.json")
_END = layout.AUDIT + "~"
"""A key that sorts after every entry."""
REGISTRY = "registry"
"""The actor of what the registry does by itself."""
_WINDOW_S = 60.0
_BATCH_KEYS = 200
_MAX_READ = 2000
"""Entries after which a page ends."""
_MAX_SHARED = 64
"""Most versions in an entry about several of them."""


class Audit:
    """Writes and reads entries."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._shared = RequestBatcher(self._write_all, _MAX_SHARED)

    async def write(
        self,
        actor: str,
        tenant: str,
        action: str,
        subject: str,
        *,
        digest: str = "",
        details: Mapping[str, str] | None = None,
        after: After = None,
    ) -> None:
        """Append one entry, stamped with the time of this machine. `after` as in `ObjectStore`."""
        time_s = now_s()
        entry = AuditRecord(time_s, actor, tenant, action, subject, digest, dict(details or {}))
        key = layout.audit(_date(time_s), ulid(time_s))
        await self._store.put(key, encode(entry), after=after)

    async def write_version(
        self,
        actor: str,
        action: str,
        version: VersionRecord,
        *,
        after: After = None,
        **details: str,
    ) -> None:
        """Append one entry about a version. `after` as in `ObjectStore`."""
        await self.write(
            actor,
            version.tenant,
            action,
            version.ref,
            digest=version.digest,
            details=details,
            after=after,
        )

    async def write_shared(self, actor: str, tenant: str, action: str, version: str) -> None:
        """Append `version` to an entry about several of them, which has those that come while the
        one before is written."""
        await self._shared.ask((actor, tenant, action, version))

    async def _write_all(self, wanted: Sequence[tuple[str, str, str, str]]) -> list[None]:
        for (actor, tenant, action), some in groupby(sorted(wanted), key=itemgetter(0, 1, 2)):
            details = {"versions": " ".join(version for *_, version in some)}
            await self.write(actor, tenant, action, tenant, details=details)
        return [None] * len(wanted)

    async def page(
        self, tenant: str, page_size: int, before: str = ""
    ) -> tuple[list[AuditRecord], str]:
        """Entries, newest first, and the key at which the next page begins; "" on the last page.
        Damaged ones are logged and left out. A page may be short, or empty, because it ends after
        a number of entries of all tenants.

        Args:
            tenant: tenant of the entries; "" = all tenants.
            before: key of the last entry of the previous page.

        Raises:
            InvalidRequest: `before` is not such a key.
        """
        if before and not _KEY.fullmatch(before):
            description = "is not a page token of this list; start again without one"
            raise InvalidRequest.field("page_token", before, description)
        entries: list[AuditRecord] = []
        num_read = 0
        async for keys in self._backwards(before or _END):
            records = await self._store.get_many(keys)
            note_read.get()(len(keys))
            num_read += len(keys)
            for key, data in zip(keys, records, strict=True):
                for entry in intact(AuditRecord, [(key, data)] if data is not None else []):
                    if tenant in ("", entry.tenant):
                        entries.append(entry)
                if len(entries) == page_size:
                    return entries, key
            if num_read >= _MAX_READ and _KEY.fullmatch(keys[-1]):
                return entries, keys[-1]
        return entries, ""

    async def _backwards(self, before: str) -> AsyncIterator[list[str]]:
        """Keys that sort before one, newest first, in batches.

        Stores list forwards only, so this looks through windows of time, each before the last one:
        short where entries are dense, twice as long after every empty one.
        """
        oldest = await anext(self._store.list_objects(layout.AUDIT), None)
        end_s = now_s() if before == _END else time_of_ulid(before.rpartition("/")[2])
        window_s = _WINDOW_S
        while oldest is not None and before > oldest.key:
            end_s -= window_s
            begin = _key_before(end_s)
            keys = []
            async for info in self._store.list_objects(layout.AUDIT, start_after=begin):
                if info.key >= before:
                    break
                keys.append(info.key)
            window_s = _WINDOW_S if keys else 2 * window_s
            before = begin
            keys.reverse()
            for at in range(0, len(keys), _BATCH_KEYS):
                yield keys[at : at + _BATCH_KEYS]


def _key_before(time_s: float) -> str:
    """A key that sorts before all entries of this moment, and after all earlier ones."""
    time_s = max(0.0, time_s)
    return layout.audit(_date(time_s), first_ulid(time_s))


def _date(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))
