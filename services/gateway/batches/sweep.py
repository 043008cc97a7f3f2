"""Deletes expired files, old batch jobs, and what killed gateways left of files that nobody sees.

Every gateway does it, a few times a day. Two that do it at the same time delete the same things.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from loraplex.errors import LoraplexError
from loraplex_services.common import documents
from loraplex_services.common.limits import FILE_LIFETIME_S
from loraplex_services.common.objects import ObjectStore
from loraplex_services.common.ulid import time_of_ulid
from loraplex_services.gateway.batches import layout
from loraplex_services.gateway.batches.files import FileRecord, Files
from loraplex_services.gateway.batches.records import WINDOW_S
from loraplex_services.gateway.batches.storage import Storage

logger = logging.getLogger(__name__)

_INTERVAL_S = 6 * 3600.0
_GRACE_S = 25 * 3600.0
"""An expired file stays this long for batch jobs that read it, and so do segments without a file
for uploads that write them."""


@dataclass(slots=True)
class _Tenant:
    """The files of one tenant by id."""

    name: str
    modified_s: dict[str, float] = field(default_factory=dict)
    """When the last segment of a file was written, by the store's clock."""
    documents: list[str] = field(default_factory=list)


class Sweeper:
    """Sweeps all tenants, again and again."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._files = Files(storage)

    async def run(self) -> None:
        """Sweep until cancelled. Gateways that start together do not sweep together."""
        while True:
            await asyncio.sleep(random.uniform(0.5, 1.0) * _INTERVAL_S)
            try:
                num_deleted = await self.sweep()
            except LoraplexError as error:
                logger.warning("sweeping files failed", extra={"problem": error.message})
            else:
                logger.info("files swept", extra={"deleted": num_deleted})

    async def sweep(self) -> int:
        """Sweep once. Returns the number of files and batch jobs that were deleted."""
        store = await self._storage.store()
        abandoned_s = await store.clock_s() - _GRACE_S
        num_deleted = await _forget_batches(store)
        async with aclosing(_tenants(store)) as tenants:
            async for tenant in tenants:
                for file_id in await self._outdated(store, tenant, abandoned_s):
                    await self._files.delete(tenant.name, file_id)
                    num_deleted += 1
        return num_deleted

    async def _outdated(self, store: ObjectStore, tenant: _Tenant, abandoned_s: float) -> list[str]:
        """Ids of expired files, and of those that were never added."""
        known = set(map(layout.id_of_document, tenant.documents))
        found = [
            file_id
            for file_id, modified_s in tenant.modified_s.items()
            if file_id not in known and modified_s < abandoned_s
        ]
        now_s = time.time()
        # Younger ones cannot have expired, and reading them all would take long.
        old = [
            layout.file_document(tenant.name, file_id)
            for file_id in known
            if time_of_ulid(file_id.partition("-")[2]) < now_s - FILE_LIFETIME_S.least - _GRACE_S
        ]
        read = documents.stream(store, old, FileRecord)
        expired = [each.file_id async for each in read if each.is_expired(now_s - _GRACE_S)]
        return found + expired


async def _forget_batches(store: ObjectStore) -> int:
    """Delete batch jobs whose files have expired for certain. Returns their number."""
    old_s = time.time() - FILE_LIFETIME_S.most - WINDOW_S - _GRACE_S
    old = [
        info.key
        async for info in store.list_objects(layout.BATCHES)
        if info.key.endswith(".json")
        and time_of_ulid(layout.id_of_document(info.key).partition("_")[2]) < old_s
    ]
    for key in old:
        await store.delete(key)
    return len(old)


async def _tenants(store: ObjectStore) -> AsyncGenerator[_Tenant]:
    tenant = _Tenant("")
    async for info in store.list_objects(layout.FILES):
        name, kind, rest = info.key.removeprefix(layout.FILES).split("/", 2)
        if name != tenant.name:
            yield tenant
            tenant = _Tenant(name)
        if kind == "documents":
            tenant.documents.append(info.key)
        else:
            file_id = rest.partition("/")[0]
            newest_s = max(tenant.modified_s.get(file_id, 0.0), info.modified_s)
            tenant.modified_s[file_id] = newest_s
    yield tenant
