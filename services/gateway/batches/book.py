"""Creates, finds, lists and changes batch jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from loraplex.errors import Conflict, NotFound, ResourceExhausted
from loraplex_services.common import documents
from loraplex_services.common.documents import StoredDocument
from loraplex_services.common.limits import (
    MAX_BATCHES_PER_TENANT,
    MAX_UNFINISHED_BATCHES_PER_TENANT,
)
from loraplex_services.gateway.batches import layout
from loraplex_services.gateway.batches.records import CANCELLING, BatchRecord, cancelled
from loraplex_services.gateway.batches.storage import Storage

Step = Callable[[BatchRecord], BatchRecord | None]


class BatchBook:
    """The batch jobs of all tenants in the object store."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def create(self, record: BatchRecord, keys: Sequence[str]) -> None:
        """Store a new batch job, for any gateway to run. It takes the place of the oldest one if
        its tenant has as many documents, `keys`, as are kept.

        Raises: ResourceExhausted if its tenant has too many that have not ended.
        """
        store = await self._storage.store()
        unfinished = await self.unfinished(record.tenant)
        if len(unfinished) >= MAX_UNFINISHED_BATCHES_PER_TENANT:
            raise ResourceExhausted(
                f"tenant {record.tenant!r} has {len(unfinished)} batch jobs that have not ended, "
                "which is the limit; wait for some or cancel them",
                reason="TOO_MANY_BATCHES",
            )
        await self._forget_oldest(keys, {batch_id for _, batch_id in unfinished})
        # In this order a killed gateway leaves no batch job that nobody would run.
        await store.put(layout.unfinished(record.tenant, record.batch_id), b"{}")
        key = layout.batch_document(record.tenant, record.batch_id)
        await store.put(key, documents.encode(record))

    async def find(self, tenant: str, batch_id: str) -> StoredDocument[BatchRecord] | None:
        """The batch job and its etag, or None."""
        store = await self._storage.store()
        return await documents.find(store, layout.batch_document(tenant, batch_id), BatchRecord)

    async def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises: NotFound if the tenant has no such batch job."""
        found = None
        if layout.is_batch_id(batch_id):
            found = await self.find(tenant, batch_id)
        if found is None:
            raise _not_found(batch_id)
        return found.record

    async def documents(self, tenant: str) -> list[str]:
        """The keys of the documents of the tenant's batch jobs, in order of time."""
        store = await self._storage.store()
        return [info.key async for info in store.list_objects(layout.batch_documents(tenant))]

    async def listed(self, keys: Sequence[str]) -> AsyncGenerator[BatchRecord]:
        """The batch jobs with these documents, as far as they can be read."""
        store = await self._storage.store()
        async for record in documents.stream(store, keys, BatchRecord):
            yield record

    async def unfinished(self, tenant: str = "") -> list[tuple[str, str]]:
        """Tenants and ids of batch jobs that have not ended; of one tenant if it is given."""
        store = await self._storage.store()
        prefix = layout.unfinished_of(tenant) if tenant else layout.UNFINISHED
        keys = [info.key async for info in store.list_objects(prefix)]
        pairs = [key.removeprefix(layout.UNFINISHED).partition("/") for key in keys]
        return [(owner, batch_id) for owner, _, batch_id in pairs]

    async def forget(self, tenant: str, batch_id: str) -> None:
        """Note that no gateway need look at a batch job any more."""
        store = await self._storage.store()
        await store.delete(layout.unfinished(tenant, batch_id))

    async def change(self, tenant: str, batch_id: str, step: Step) -> BatchRecord | None:
        """Replace a batch job by `step(current)`, as in `documents.change`; None if there is none.

        `step` may run once more after it has had its effect, if the store cannot tell.
        """

        def changed(current: BatchRecord | None) -> BatchRecord | None:
            return None if current is None else step(current)

        store = await self._storage.store()
        key = layout.batch_document(tenant, batch_id)
        return await documents.change(store, key, BatchRecord, changed)

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """End a batch job; its owner notices. Raises: NotFound, Conflict if it is too late."""
        if not layout.is_batch_id(batch_id):
            raise _not_found(batch_id)
        record = await self.change(tenant, batch_id, cancelled)
        if record is None:
            raise _not_found(batch_id)
        if record.status != CANCELLING:
            raise Conflict(f"the batch job is {record.status} and cannot be cancelled")
        return record

    async def input_of(self, tenant: str, file_id: str) -> str:
        """The id of a batch job that has not ended and reads a file; "" if there is none."""
        names = await self.unfinished(tenant)
        async for record in self.listed([layout.batch_document(*name) for name in names]):
            if not record.has_ended and record.input_file_id == file_id:
                return record.batch_id
        return ""

    async def _forget_oldest(self, keys: Sequence[str], unfinished: Collection[str]) -> None:
        """Delete the oldest documents of ended batch jobs until one more is within the limit."""
        surplus = len(keys) + 1 - MAX_BATCHES_PER_TENANT
        if surplus <= 0:
            return
        store = await self._storage.store()
        ended = [key for key in keys if layout.id_of_document(key) not in unfinished]
        for key in ended[:surplus]:
            await store.delete(key)


def _not_found(batch_id: str) -> NotFound:
    why = "no such batch job; those that ended a month ago are no longer kept"
    return NotFound.field("batch_id", batch_id[:80], why, reason="BATCH_NOT_FOUND")
