"""The audit log: one object per change, written before its acknowledgement, never altered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from services.common.objects import ObjectStore
from services.registry import documents, layout
from services.registry.clock import now_s, ulid
from services.registry.records import AuditRecord, encode


class Audit:
    """Writes and reads entries."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def write(
        self,
        actor: str,
        tenant: str,
        action: str,
        subject: str,
        *,
        digest: str = "",
        details: Mapping[str, str] | None = None,
    ) -> None:
        """Append one entry, stamped with the time of this machine."""
        time_s = now_s()
        entry = AuditRecord(time_s, actor, tenant, action, subject, digest, dict(details or {}))
        date = time.strftime("%Y-%m-%d", time.gmtime(time_s))
        await self._store.put(layout.audit(date, ulid(time_s)), encode(entry))

    async def page(
        self, tenant: str, page_size: int, before: str = ""
    ) -> tuple[list[AuditRecord], str]:
        """Entries, newest first, and the key to go on before; "" on the last page.

        Args:
            tenant: whose entries; "" = everybody's.
            before: key of the last entry of the previous page.
        """
        keys = [info.key async for info in self._store.list_objects(layout.AUDIT)]
        keys = [key for key in reversed(keys) if not before or key < before]
        entries: list[AuditRecord] = []
        for begin in range(0, len(keys), 200):
            batch = keys[begin : begin + 200]
            records = await documents.read_all(self._store, batch, AuditRecord)
            for key, record in zip(batch, records, strict=False):
                if tenant in ("", record.tenant):
                    entries.append(record)
                    if len(entries) == page_size:
                        return entries, key
            await asyncio.sleep(0)
        return entries, ""
