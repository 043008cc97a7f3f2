"""Deletes old versions of adapters with `keep_versions`, and ephemeral versions whose time is over
or whose tenant has too many bytes of them.

No caller waits for it. Versions that remain after a failure are deleted after the next publication,
and after a crash, after the next one of the same name or at the next regular check. The bytes are
collected later, so that a running request with a deleted version can still move to another worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Collection, Sequence

from loraplex.errors import LoraplexError
from loraplex_services.registry.access.audit import REGISTRY
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.items import scope_of
from loraplex_services.registry.index.redis_calls import CatalogDown
from loraplex_services.registry.publish.deletion import Deletion
from loraplex_services.registry.records import VersionRecord, now_s

logger = logging.getLogger(__name__)

RETIRE_PAUSE_S = 1.0
"""Seconds after an update before older ones are retired: workers fetch the new one in the meantime,
and several updates of a fast trainer are handled together."""
_NUM_ENDED_TOGETHER = 64
"""They share an entry in the audit log."""
_NOT_RETIRED = "versions not retired"
_SPARE_SHARE = 0.1
"""The share of a tenant's limit that is free after a count of its ephemeral versions. They are
counted again once that much has been published."""


class Retention:
    """Deletes versions that were published to be replaced."""

    def __init__(
        self, catalog: Catalog, deletion: Deletion, max_ephemeral_bytes: int | None
    ) -> None:
        """`max_ephemeral_bytes`: of one tenant; None = no limit."""
        self._catalog = catalog
        self._deletion = deletion
        self._max_ephemeral_bytes = max_ephemeral_bytes
        self._added_bytes: dict[str, float] = {}
        """By tenant: bytes of ephemeral versions published here since they were last counted."""
        self._updated: dict[tuple[str, str], int] = {}
        """Adapters with a new update, and how many of their updates are kept."""
        self._wake = asyncio.Event()
        self.num_retired = 0
        """Numbers of versions since the registry started."""

    def published(self, version: VersionRecord) -> None:
        """Check later whether older versions must be deleted after this new version."""
        if version.keep_versions:
            self._updated[version.tenant, version.name] = version.keep_versions
            self._wake.set()
        if version.expires_s and self._max_ephemeral_bytes is not None:
            added = self._added_bytes.get(version.tenant, math.inf) + version.size_bytes
            self._added_bytes[version.tenant] = added
            self._wake.set()

    async def used(self, scopes: Collection[str]) -> None:
        """Note that adapters were used, in the order of which ephemeral versions are deleted."""
        if self._max_ephemeral_bytes is not None:
            await self._catalog.recent_uses.note(scopes)

    async def run(self) -> None:
        """Retire what `published` named, one adapter after another, until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(RETIRE_PAUSE_S)
            self._wake.clear()
            updated, self._updated = self._updated, {}
            for (tenant, name), kept in updated.items():
                if not await logged(self.retire(tenant, name, kept), _NOT_RETIRED):
                    self._updated.setdefault((tenant, name), kept)
            for tenant, added in list(self._added_bytes.items()):
                if added >= _SPARE_SHARE * (self._max_ephemeral_bytes or 0):
                    self._added_bytes[tenant] = 0
                    if not await logged(self.trim(tenant), _NOT_RETIRED):
                        self._added_bytes[tenant] = math.inf

    async def retire(self, tenant: str, name: str, kept: int) -> None:
        """Delete all but the newest `kept` of the versions that were published as updates. Versions
        with a tag stay."""
        found = await self._catalog.find(scope_of(tenant, name), "live")
        updates = [record.version for record in found.versions if record.keep_versions]
        tagged = {target.version for tag in found.tags for target in (*tag.targets, *tag.pending)}
        old = [number for number in sorted(updates)[:-kept] if number not in tagged]
        if old:
            await self._deletion.retire(tenant, name, old, REGISTRY)
            self.num_retired += len(old)

    async def trim(self, tenant: str) -> None:
        """Delete the ephemeral versions of a tenant that were used least recently, until the others
        leave a tenth of its limit free. The one that was used last stays, however large it is. Uses
        of other adapters are forgotten: there may be one for each request."""
        held = await self._catalog.ephemeral_versions(tenant)
        used_s = await self._catalog.recent_uses.of_tenant(tenant)
        scopes = {scope_of(version.tenant, version.name) for version in held}
        await self._catalog.recent_uses.forget(tenant, used_s.keys() - scopes)
        held.sort(key=lambda v: max(v.created_s, used_s.get(scope_of(v.tenant, v.name), 0.0)))
        most = (1 - _SPARE_SHARE) * (self._max_ephemeral_bytes or 0)
        num_bytes = sum(version.size_bytes for version in held)
        ended = []
        for version in held[:-1]:
            if num_bytes <= most:
                break
            ended.append((scope_of(tenant, version.name), version.version))
            num_bytes -= version.size_bytes
        await self._end(ended)

    async def expire(self) -> None:
        """Delete the ephemeral versions whose time is over, with their tags."""
        await self._end(await self._catalog.expired(now_s()))

    async def _end(self, versions: Sequence[tuple[str, int]]) -> None:
        """Delete ephemeral versions."""
        for at in range(0, len(versions), _NUM_ENDED_TOGETHER):
            some = versions[at : at + _NUM_ENDED_TOGETHER]
            self.num_retired += await self._deletion.end(some, REGISTRY)


async def logged(work: Awaitable[object], problem: str) -> bool:
    """Await work that is repeated later. A failure is logged as `problem`, and returns False."""
    try:
        await work
        return True
    except CatalogDown:
        pass  # The task that keeps the index logs this.
    except LoraplexError as error:
        logger.warning(problem, extra={"problem": error.message})
    except Exception:
        logger.exception(problem)
    return False
