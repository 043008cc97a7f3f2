"""Regular tasks of a registry: garbage collection, snapshots, expiry of moves and versions."""

from __future__ import annotations

import asyncio
import datetime
import logging

from loraplex.errors import LoraplexError
from loraplex_services.registry.access.audit import REGISTRY, Audit
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.redis_calls import CatalogDown
from loraplex_services.registry.index.usage import UsageBook
from loraplex_services.registry.maintenance.gc import MIN_AGE_S, Collector
from loraplex_services.registry.maintenance.snapshots import Snapshots
from loraplex_services.registry.publish.retention import Retention
from loraplex_services.registry.publish.staging import Staging

logger = logging.getLogger(__name__)

_CHECK_S = 600.0
_EXPIRE_CHECK_S = 1.0
_SNAPSHOT_CHECK_S = 60.0
SNAPSHOT_CHANGES = 1000
"""Fewer changes cost a rebuild only seconds, which is not worth another snapshot."""


async def collect_regularly(
    catalog: Catalog,
    collector: Collector,
    audit: Audit,
    retention: Retention,
    interval_s: float,
) -> None:
    """Collect garbage once per interval, however many registries there are; 0 = never. While
    versions are retired, collect once per hour, as each update of a large adapter leaves as many
    bytes.

    The metadata server decides which registry does it. That only saves work: collectors may run
    at the same time.
    """
    num_collected = 0
    while interval_s:
        await asyncio.sleep(min(interval_s, _CHECK_S))
        num_retired = retention.num_retired
        try:
            is_due = await catalog.claim_interval("gc", interval_s)
            if num_retired > num_collected and interval_s > MIN_AGE_S:
                is_due = await catalog.claim_interval("gc-retired", MIN_AGE_S) or is_due
            if is_due:
                await collect_once(collector, audit)
                num_collected = num_retired
        except LoraplexError as error:
            logger.warning("garbage not collected", extra={"problem": error.message})
        except Exception:
            logger.exception("garbage collection failed")


async def collect_once(collector: Collector, audit: Audit) -> None:
    """Collect garbage, and record it in the audit log if anything was deleted."""
    collected = await collector.collect()
    if collected.deleted_objects:
        details = {"objects": str(collected.deleted_objects)}
        await audit.write(REGISTRY, "", "gc", "blobs", details=details)


async def expire_regularly(staging: Staging, retention: Retention) -> None:
    """Drop staged moves that are late, and ephemeral versions whose time is over. Every registry
    does this; the first one succeeds."""
    while True:
        await asyncio.sleep(_EXPIRE_CHECK_S)
        try:
            await staging.expire()
            await retention.expire()
        except CatalogDown:
            continue  # The task that keeps the index logs this.
        except LoraplexError as error:
            logger.warning("ends not checked", extra={"problem": error.message})
        except Exception:
            logger.exception("ends not checked")


async def copy_regularly(catalog: Catalog, snapshots: Snapshots) -> None:
    """Write a snapshot whenever enough has changed, if the store supports that.

    The metadata server decides which registry does it, as for collections.
    """
    while snapshots.are_useful:
        await asyncio.sleep(_SNAPSHOT_CHECK_S)
        try:
            if await catalog.claim_interval("snapshot", _SNAPSHOT_CHECK_S):
                await copy_if_due(catalog, snapshots)
        except LoraplexError as error:
            logger.warning("no snapshot written", extra={"problem": error.message})
        except Exception:
            logger.exception("snapshot failed")


async def copy_usage_regularly(catalog: Catalog, usage: UsageBook) -> None:
    """Copy what tenants used to the object store; one registry of all does it."""
    while True:
        await asyncio.sleep(_CHECK_S)
        try:
            if await catalog.claim_interval("usage", _CHECK_S):
                await copy_usage(usage)
        except Exception:
            logger.exception("usage not copied")


async def copy_usage(usage: UsageBook) -> None:
    """Copy the usage of the last days to the object store; failures are logged."""
    try:
        await usage.copy(datetime.datetime.now(datetime.UTC).date())
    except LoraplexError as error:
        logger.warning("usage not copied", extra={"problem": error.message})


async def copy_if_due(catalog: Catalog, snapshots: Snapshots) -> bool:
    """Write a snapshot if the index is new or has changed much since the last one."""
    changes = await catalog.changes_since_snapshot()
    if changes is not None and changes < SNAPSHOT_CHANGES:
        return False
    position = await catalog.position()
    await snapshots.write()
    await catalog.note_snapshot(*position)
    return True
