"""Keeps the index equal to the objects: repairs missed changes and rebuilds a lost index."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.errors import DataLoss, NotFound
from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.items import (
    BASES_SCOPE,
    IndexChange,
    Item,
    adapter_item,
    base_item,
    scope_of,
    tag_item,
    version_item,
)
from loraplex_services.registry.index.redis_calls import CatalogDown, NoIndex
from loraplex_services.registry.maintenance.snapshots import Snapshots
from loraplex_services.registry.publish.metrics import (
    INDEX_LAG_S,
    METADATA_BYTES,
    METADATA_MAX_BYTES,
    REBUILDS,
)
from loraplex_services.registry.publish.publisher import Publisher
from loraplex_services.registry.publish.uploads import Uploads
from loraplex_services.registry.records import (
    AdapterRecord,
    BaseRecord,
    TagRecord,
    VersionRecord,
)

logger = logging.getLogger(__name__)

_MAX_TRIES = 3
_PENDING_AGE_S = 60.0
"""If a noted change is not applied within this time, the process that noted it has died."""


class Indexer:
    """Repairs and rebuilds."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: Catalog,
        uploads: Uploads,
        publisher: Publisher,
        snapshots: Snapshots,
    ) -> None:
        self._store = store
        self._snapshots = snapshots
        self._catalog = catalog
        self._uploads = uploads
        self._publisher = publisher
        self._rebuilding = asyncio.Lock()
        self._problem = ""
        self._checked_s: float | None = None
        """When the last check ended, on the event loop's clock."""
        self._complete_s = time.monotonic()
        """When the last check that found no problem ended."""

    async def start(self) -> None:
        """Build the index if needed and complete interrupted publications, before the first read.

        Raises: CatalogDown, also if Redis may drop parts of an index.
        """
        with self._lag_until_checked():
            await self.measure()
            await self.ensure()
            await self.recover()
            await self.repair(0.0)

    async def keep(self, interval_s: float) -> None:
        """Check regularly that the index exists and is complete; repair it if not."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                with self._lag_until_checked():
                    await self.ensure()
                    await self.repair(_PENDING_AGE_S)
                    await self.measure()
                if self._problem:
                    logger.info("index available again")
                self._problem = ""
            except CatalogDown as error:
                if error.message != self._problem:
                    logger.warning("index unavailable", extra={"problem": error.for_log})
                self._problem = error.message
            except Exception:
                self._problem = "the check failed; see the registry's log"
                logger.exception("index check failed")
            self._checked_s = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def _lag_until_checked(self) -> Iterator[None]:
        """An index that cannot be checked counts as behind since the last check that could be
        made, because nobody knows which changes it lacks."""
        try:
            yield
        except Exception:
            INDEX_LAG_S.set(time.monotonic() - self._complete_s)
            raise
        self._complete_s = time.monotonic()

    def state(self) -> dict[str, Any]:
        """When the index was checked, and what was wrong with it, for /debug/state."""
        age_s = None
        if self._checked_s is not None:
            age_s = round(asyncio.get_running_loop().time() - self._checked_s, 3)
        return {
            "is_rebuilding": self._rebuilding.locked(),
            "last_check_age_s": age_s,
            "problem": self._problem,
        }

    async def measure(self) -> None:
        """Report how full the metadata server is.

        Raises: CatalogDown, also if Redis may drop parts of an index.
        """
        used, limit = await self._catalog.memory_bytes()
        METADATA_BYTES.set(used)
        METADATA_MAX_BYTES.set(limit)

    async def ensure(self) -> None:
        """Rebuild if there is no index, or if it went back in time after a failover."""
        epoch = await self._catalog.epoch()
        with contextlib.suppress(NoIndex):
            await self._catalog.position()
            return
        if epoch is not None:
            logger.warning("index went back in time", extra={"epoch": epoch})
        async with self._rebuilding:
            if await self._catalog.epoch() != epoch:
                return
            for _ in range(_MAX_TRIES):
                with contextlib.suppress(NoIndex):
                    await self._rebuild()
                    return
            await self._rebuild()

    async def recover(self) -> int:
        """Complete publications that died between becoming visible and being acknowledged.

        One whose session is gone or damaged is left as it is: it must not keep a registry from
        starting.
        """
        count = 0
        for upload_id in await self._uploads.unfinished():
            try:
                count += await self._publisher.recover(upload_id)
            except (NotFound, DataLoss) as error:
                fields = {"upload_id": upload_id, "problem": error.message}
                logger.warning("publication not completed", extra=fields)
        if count:
            logger.info("interrupted publications completed", extra={"count": count})
        return count

    async def repair(self, min_age_s: float) -> None:
        """Read scopes again whose noted changes never reached the index."""
        noted = await self._catalog.pending()
        INDEX_LAG_S.set(max((age_s for _, _, age_s in noted), default=0.0))
        pending = [entry for entry in noted if entry[2] >= min_age_s]
        if not pending:
            return
        if min_age_s:
            await self.recover()
        for scope in {scope for _, scope, _ in pending}:
            await self.refresh(scope)
        # Younger notes stay: their writers may be about to change objects still.
        dead = [operation for operation, _, age_s in pending if age_s >= _PENDING_AGE_S]
        await self._catalog.forget_pending(dead)

    async def refresh(self, scope: str) -> None:
        """Update one scope from its objects."""
        await self._catalog.apply(scope, await self._items_of(scope))

    async def rebuild(self) -> tuple[str, int, int, int]:
        """Build a new index from the objects and replace the old one.

        Returns (epoch, versions, tags, bases), deleted ones not counted. Where another process
        rebuilds already, waits for it instead and counts nothing.
        """
        async with self._rebuilding:
            return await self._rebuild()

    async def _rebuild(self) -> tuple[str, int, int, int]:
        before = await self._catalog.epoch()
        epoch = await self._catalog.begin_rebuild()
        while epoch is None:
            await asyncio.sleep(0.2)
            now = await self._catalog.epoch()
            if now is not None and now != before:
                return now, 0, 0, 0
            epoch = await self._catalog.begin_rebuild()
        try:
            counts = await self._fill(epoch)
            await self._switch(epoch)
        except BaseException:
            await self._catalog.release_rebuild(epoch)
            await self._catalog.drop(epoch)
            raise
        REBUILDS.inc()
        if before is not None:
            await self._catalog.drop(before)
        logger.info("index rebuilt", extra={"epoch": epoch, "versions": counts[0]})
        return (epoch, *counts)

    async def _switch(self, epoch: str) -> None:
        """Read what changed during the rebuild until nothing did, then make the index current."""
        while (left := await self._catalog.switch(epoch)) is not True:
            if left is False:
                raise NoIndex("Redis was emptied during the rebuild", retry_after_s=1.0)
            if isinstance(left, list):
                changed = [IndexChange(scope, await self._items_of(scope)) for scope in left]
                await self._catalog.apply_many(epoch, changed)

    async def _fill(self, epoch: str) -> tuple[int, int, int]:
        """Read every document into the index under construction; returns the number of live
        ones."""
        bases = await self._items_of(BASES_SCOPE)
        await self._catalog.apply_many(epoch, [IndexChange(BASES_SCOPE, bases)])
        versions = tags = 0
        applying: asyncio.Task[None] | None = None
        try:
            async for batch in self._snapshots.documents():
                adapters = _adapters(batch)
                versions += sum(len(adapter.live) for adapter in adapters)
                tags += sum(tag.is_shown for adapter in adapters for tag in adapter.tags)
                # The next documents are read while Redis takes these.
                if applying is not None:
                    await applying
                applying = asyncio.create_task(self._fill_batch(epoch, adapters))
        finally:
            if applying is not None:
                await applying
        return versions, tags, len(bases)

    async def _fill_batch(self, epoch: str, adapters: Sequence[_Adapter]) -> None:
        await self._catalog.apply_many(epoch, [IndexChange(a.scope, a.items()) for a in adapters])
        await self._catalog.extend_rebuild()

    async def _items_of(self, scope: str) -> list[Item]:
        if scope == BASES_SCOPE:
            found = await self._store.get_folder(layout.BASES)
            return [base_item(base) for base in documents.intact(BaseRecord, found)]
        prefix = layout.adapter_folder(*scope.split("/", 1))
        return _Adapter.of(scope, dict(await self._store.get_folder(prefix))).items()


@dataclass(frozen=True, slots=True)
class _Adapter:
    """All documents of one adapter."""

    scope: str
    record: AdapterRecord | None
    versions: list[VersionRecord]
    tags: list[TagRecord]

    @classmethod
    def of(cls, scope: str, found: Mapping[str, bytes]) -> _Adapter:
        """Decode documents, given by their keys. Those that are damaged are left out."""
        key = layout.adapter(*scope.split("/", 1))
        records = documents.intact(AdapterRecord, [(key, found[key])] if key in found else [])
        read = sorted(found.items())
        return cls(
            scope,
            records[0] if records else None,
            documents.intact(VersionRecord, [each for each in read if "/versions/" in each[0]]),
            documents.intact(TagRecord, [each for each in read if "/tags/" in each[0]]),
        )

    @property
    def live(self) -> list[VersionRecord]:
        """The versions that are not deleted."""
        return [version for version in self.versions if not version.deleted]

    def items(self) -> list[Item]:
        """Index entries, with versions before the tags that point at them."""
        items = [adapter_item(self.record)] if self.record is not None else []
        items += [version_item(version, self.record) for version in self.versions]
        return items + [tag_item(tag) for tag in self.tags]


def _adapters(documents_: Sequence[tuple[str, bytes]]) -> list[_Adapter]:
    """The documents of whole adapters, by adapter."""
    scopes: dict[str, dict[str, bytes]] = {}
    for key, data in documents_:
        adapter = layout.adapter_of(key)
        if adapter is not None:
            scopes.setdefault(scope_of(*adapter), {})[key] = data
    return [_Adapter.of(scope, found) for scope, found in scopes.items()]
