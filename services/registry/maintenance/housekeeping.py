"""Regular tasks of a registry: garbage collection, snapshots, expiry of moves and versions."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable

from loraplex_services.registry.access.audit import REGISTRY, Audit
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.usage import UsageBook
from loraplex_services.registry.maintenance.gc import MIN_AGE_S, Collector
from loraplex_services.registry.maintenance.snapshots import Snapshots
from loraplex_services.registry.publish.retention import Retention, logged
from loraplex_services.registry.publish.staging import Staging

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

    async def collect() -> None:
        nonlocal num_collected
        num_retired = retention.num_retired
        is_due = await catalog.claim_interval("gc", interval_s)
        if num_retired > num_collected and interval_s > MIN_AGE_S:
            is_due = await catalog.claim_interval("gc-retired", MIN_AGE_S) or is_due
        if is_due:
            await collect_once(collector, audit)
            num_collected = num_retired

    if interval_s:
        await _repeat(min(interval_s, _CHECK_S), collect, "garbage not collected")


async def collect_once(collector: Collector, audit: Audit) -> None:
    """Collect garbage, and record it in the audit log if anything was deleted."""
    collected = await collector.collect()
    if collected.deleted_objects:
        details = {"objects": str(collected.deleted_objects)}
        await audit.write(REGISTRY, "", "gc", "blobs", details=details)


async def expire_regularly(staging: Staging, retention: Retention) -> None:
    """Drop staged moves that are late, and ephemeral versions whose time is over. Every registry
    does this; the first one succeeds."""

    async def expire() -> None:
        await staging.expire()
        await retention.expire()

    await _repeat(_EXPIRE_CHECK_S, expire, "ends not checked")


async def copy_regularly(catalog: Catalog, snapshots: Snapshots) -> None:
    """Write a snapshot whenever enough has changed, if the store supports that.

    The metadata server decides which registry does it, as for collections.
    """

    async def copy() -> None:
        if await catalog.claim_interval("snapshot", _SNAPSHOT_CHECK_S):
            await copy_if_due(catalog, snapshots)

    if snapshots.are_useful:
        await _repeat(_SNAPSHOT_CHECK_S, copy, "no snapshot written")


async def copy_usage_regularly(catalog: Catalog, usage: UsageBook) -> None:
    """Copy what tenants used to the object store; one of all registries does it."""

    async def copy() -> None:
        if await catalog.claim_interval("usage", _CHECK_S):
            await copy_usage(usage)

    await _repeat(_CHECK_S, copy, "usage not copied")


async def copy_usage(usage: UsageBook) -> None:
    """Copy the usage of the last days to the object store; failures are logged."""
    await logged(usage.copy(datetime.datetime.now(datetime.UTC).date()), "usage not copied")


async def copy_if_due(catalog: Catalog, snapshots: Snapshots) -> bool:
    """Write a snapshot if the index is new or has changed much since the last one."""
    changes = await catalog.changes_since_snapshot()
    if changes is not None and changes < SNAPSHOT_CHANGES:
        return False
    position = await catalog.position()
    await snapshots.write()
    await catalog.note_snapshot(*position)
    return True


async def _repeat(pause_s: float, work: Callable[[], Awaitable[None]], problem: str) -> None:
    """Do work after each pause, until cancelled. A failure is logged as `problem`."""
    while True:
        await asyncio.sleep(pause_s)
        await logged(work(), problem)
