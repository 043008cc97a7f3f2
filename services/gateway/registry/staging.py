"""Completes staged tag moves: loads the new version on the workers of the old one, then moves the
tag.

Every gateway does this for every pending tag and chooses the same workers, so that no leader is
needed: loads are idempotent, and the registry lets exactly one gateway finish the move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from loraplex.api.registry import Tag
from loraplex.api.residency import Tier
from loraplex.errors import (
    Conflict,
    DeadlineExceeded,
    LoraplexError,
    ResourceExhausted,
    Unavailable,
)
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.registry.link import RegistryLink
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.gateway.registry.snapshot import Version
from loraplex_services.gateway.routing.router import rendezvous_order
from loraplex_services.gateway.workers.fleet import Fleet
from loraplex_services.gateway.workers.view import WorkerView

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_RETRY_S = 0.5
_OPEN_S = 86_400.0
"""Time for a move that is late, which the registry drops."""
_TRANSIENT = (Unavailable, DeadlineExceeded, ResourceExhausted)
"""Failures that are worth a retry."""


class Stager:
    """One task for each pending tag."""

    def __init__(self, resolver: Resolver, fleet: Fleet, registry: RegistryLink) -> None:
        self._resolver = resolver
        self._fleet = fleet
        self._registry = registry
        self._tasks: dict[tuple[str, str, str], tuple[int, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Follow the snapshot until cancelled."""
        try:
            while True:
                self._start_and_drop()
                await asyncio.sleep(_POLL_S)
        finally:
            for _, task in self._tasks.values():
                task.cancel()

    def _start_and_drop(self) -> None:
        """Tasks for tags that are pending now, and for no others."""
        pending = self._resolver.snapshot.pending
        for key in [p for p in self._tasks if p not in pending]:
            self._tasks.pop(key)[1].cancel()
        for key, tag in pending.items():
            known = self._tasks.get(key)
            if known is not None and known[0] == tag.generation:
                continue
            if known is not None:
                known[1].cancel()
            self._tasks[key] = (tag.generation, asyncio.create_task(self._stage(tag)))

    async def _stage(self, tag: Tag) -> None:
        failure = await self._loaded(tag)
        while True:
            try:
                await self._registry.finish_staged_move(tag, failure)
                logger.info("staged move finished", extra=_fields(tag, failure or "moved"))
                return
            except Conflict:
                return
            except LoraplexError as error:
                logger.warning(
                    "staged move not finished; retrying", extra=_fields(tag, error.reason)
                )
                await asyncio.sleep(_RETRY_S)

    async def _loaded(self, tag: Tag) -> str:
        """Load the pending versions; returns "" on success, else the reason of the failure."""
        last = "no worker of its base is ready"
        until_s = now_s() + (tag.pending_left_s or _OPEN_S)
        while (left_s := until_s - now_s()) > 0:
            try:
                if await self._try(tag, left_s):
                    return ""
            except _TRANSIENT as error:
                last = error.message
            except LoraplexError as error:
                return error.message
            await asyncio.sleep(_RETRY_S)
        return f"not loaded in time: {last}"

    async def _try(self, tag: Tag, timeout_s: float) -> bool:
        """Load the pending versions once; False if no worker could. Raises: LoraplexError."""
        snapshot = self._resolver.snapshot
        loads = []
        for target in tag.pending:
            version = snapshot.version(tag.tenant, tag.name, target.version)
            if version is None:
                return False
            old = [snapshot.version(tag.tenant, tag.name, old.version) for old in tag.targets]
            views = self._fleet.views(version.base_id)
            chosen = workers_to_load(views, version, [v.digest for v in old if v is not None])
            if not chosen:
                return False
            loads += [self._fleet.load(v.address, version.digest, timeout_s) for v in chosen]
        await asyncio.gather(*loads)
        return True


def workers_to_load(
    views: Sequence[WorkerView], version: Version, old: Sequence[str]
) -> list[WorkerView]:
    """Workers to load a version on: as many as hold the old ones, in rendezvous order."""
    able = {view.worker_id: view for view in views if view.takes_requests}
    holders = sum(
        any(view.tier_of(digest) is Tier.DEVICE for digest in old) for view in able.values()
    )
    order = rendezvous_order(version.digest, able)
    return [able[worker_id] for worker_id in order[: max(holders, 1)]]


def _fields(tag: Tag, outcome: str) -> dict[str, str]:
    return {"tag": f"{tag.tenant}/{tag.name}:{tag.tag}", "outcome": outcome}
