"""What a registry does regularly: collect garbage, write snapshots, give up late tag moves."""

from __future__ import annotations

import asyncio
import logging

from loraplex.errors import LoraplexError
from services.registry.access.audit import Audit
from services.registry.index.catalog import Catalog, CatalogDown
from services.registry.maintenance.gc import Collector
from services.registry.maintenance.snapshots import Snapshots
from services.registry.publish.staging import Staging

logger = logging.getLogger(__name__)

ACTOR = "registry"
"""Who the audit log says it was."""
_CHECK_S = 600.0
_EXPIRE_CHECK_S = 1.0
_SNAPSHOT_CHECK_S = 60.0
SNAPSHOT_CHANGES = 1000
"""What a rebuild reads singly costs a few seconds: not worth another copy yet."""


async def collect_regularly(
    catalog: Catalog, collector: Collector, audit: Audit, interval_s: float
) -> None:
    """Collect for ever, once in an interval whatever the number of registries; 0 = never.

    Whose turn it is is told by the metadata server. That only saves work: collectors are safe
    beside each other.
    """
    while interval_s:
        await asyncio.sleep(min(interval_s, _CHECK_S))
        try:
            if await catalog.take_turn("gc", interval_s):
                await collect_once(collector, audit)
        except LoraplexError as error:
            logger.warning("garbage not collected", extra={"problem": error.message})
        except Exception:
            logger.exception("garbage collection failed")


async def collect_once(collector: Collector, audit: Audit) -> None:
    """Collect, and note it in the audit log where anything went."""
    collected = await collector.collect()
    if collected.deleted_objects:
        details = {"objects": str(collected.deleted_objects)}
        await audit.write(ACTOR, "", "gc", "blobs", details=details)


async def expire_regularly(staging: Staging) -> None:
    """Give up staged moves that are late, for ever. Every registry does: the first one counts."""
    while True:
        await asyncio.sleep(_EXPIRE_CHECK_S)
        try:
            await staging.expire()
        except CatalogDown:
            continue  # The index keeper says so.
        except LoraplexError as error:
            logger.warning("staged moves not checked", extra={"problem": error.message})
        except Exception:
            logger.exception("staged moves not checked")


async def copy_regularly(catalog: Catalog, snapshots: Snapshots) -> None:
    """Write a snapshot for ever, when enough has changed; where snapshots are of no use, never.

    Whose turn it is is told as for collections, and matters as little.
    """
    while snapshots.are_useful:
        await asyncio.sleep(_SNAPSHOT_CHECK_S)
        try:
            if await catalog.take_turn("snapshot", _SNAPSHOT_CHECK_S):
                await copy_if_due(catalog, snapshots)
        except LoraplexError as error:
            logger.warning("no snapshot written", extra={"problem": error.message})
        except Exception:
            logger.exception("snapshot failed")


async def copy_if_due(catalog: Catalog, snapshots: Snapshots) -> bool:
    """Write a snapshot where the index is new, or much changed since the last one."""
    changes = await catalog.changes_since_snapshot()
    if changes is not None and changes < SNAPSHOT_CHANGES:
        return False
    position = await catalog.position()
    await snapshots.write()
    await catalog.note_snapshot(*position)
    return True
