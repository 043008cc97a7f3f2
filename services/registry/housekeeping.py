"""Collecting garbage regularly, by one registry of all."""

from __future__ import annotations

import asyncio
import logging

from loraplex.errors import LoraplexError
from services.registry.assembly import Registry

logger = logging.getLogger(__name__)

ACTOR = "registry"
"""Who the audit log says it was."""
_CHECK_S = 600.0


async def collect_regularly(registry: Registry, interval_s: float) -> None:
    """Collect for ever, once in an interval whatever the number of registries; 0 = never.

    Whose turn it is is told by the metadata server. That only saves work: collectors are safe
    beside each other.
    """
    while interval_s:
        await asyncio.sleep(min(interval_s, _CHECK_S))
        try:
            if await registry.catalog.take_turn("gc", interval_s):
                await collect_once(registry)
        except LoraplexError as error:
            logger.warning("garbage not collected", extra={"problem": error.message})
        except Exception:
            logger.exception("garbage collection failed")


async def collect_once(registry: Registry) -> None:
    """Collect, and note it in the audit log where anything went."""
    collected = await registry.collector.collect()
    if collected.deleted_objects:
        details = {"objects": str(collected.deleted_objects)}
        await registry.audit.write(ACTOR, "", "gc", "blobs", details=details)
