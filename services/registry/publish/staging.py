"""Staged tag moves: the new targets are pending until workers have loaded them.

A gateway that sees a pending tag loads its targets and then finishes the move. The tag must still
have the generation that the gateway saw, so exactly one of several gateways succeeds. A direct move
cancels a pending one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Sequence

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound, Conflict, NotCertified
from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry.access.audit import REGISTRY
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.publish.tags import (
    TagAddress,
    Tags,
    check_expected,
    describe,
    moved,
)
from loraplex_services.registry.records import TagRecord, now_s

WAITING = "waiting for workers to load it"
NOBODY = "not loaded in time, and no gateway reported why; check that a gateway is running"
MAX_STAGE_S = 86_400.0
GATEWAYS_S = 2.0
"""Seconds that gateways have to give up a late move first, as they know a better reason."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Begins and ends staged moves."""

    store: ObjectStore
    catalog: Catalog
    tags: Tags

    async def begin(
        self,
        address: TagAddress,
        targets: Sequence[TagTarget],
        expect: str | None,
        mover: str,
        within_s: float,
    ) -> TagRecord:
        """Make targets pending; a later call replaces them and their time limit. A tag that
        points there already stays as it is.

        Raises:
            Conflict: the tag differs from `expect` (a digest, or "none").
            AdapterNotFound: a target does not exist.
        """
        wanted = await self.tags.resolved(address, targets)
        until_s = now_s() + min(within_s, MAX_STAGE_S)

        def step(current: TagRecord | None) -> TagRecord | None:
            check_expected(address, current, expect)
            if current is not None and wanted == current.targets:
                return _without_pending(current, "") if current.pending else None
            before = current or moved(address, None, (), mover, secrets.token_hex(8))
            return dataclasses.replace(
                before,
                generation=before.generation + (current is not None),
                pending=wanted,
                pending_reason=WAITING,
                pending_until_s=until_s,
                pending_mover=mover,
            )

        return await self._changed(address, step, lambda _: "tag.stage", mover)

    async def finish(
        self, address: TagAddress, generation: int, failure: str, actor: str
    ) -> TagRecord:
        """Move a tag to its pending targets, or drop them for the reason in `failure`.

        Raises:
            Conflict: the tag has changed since `generation`, or nothing is pending.
        """
        gone = await self._first_gone(address)

        def step(current: TagRecord | None) -> TagRecord:
            if current is None or current.generation != generation or not current.pending:
                raise Conflict(f"{address} has no pending move with generation {generation}")
            reason = failure or gone
            if not reason and now_s() > current.pending_until_s:
                reason = "no worker had it loaded in time"
            if reason:
                shown = f"{describe(current.pending)} was not taken: {reason}"
                return _without_pending(current, shown)
            mover = current.pending_mover
            return moved(address, current, current.pending, mover, secrets.token_hex(8))

        return await self._changed(
            address, step, lambda tag: "tag.drop" if tag.pending_reason else "tag.set", actor
        )

    async def expire(self) -> int:
        """Drop moves that gateways neither made nor gave up in time; returns their number."""
        late = await self.catalog.staged_until(now_s() - GATEWAYS_S)
        count = 0
        for scope, tag in late:
            tenant, _, name = scope.partition("/")
            address = await self.tags.address(tenant, name, tag)
            seen = await self.tags.read(address)
            if seen is None or not seen.pending or now_s() - GATEWAYS_S < seen.pending_until_s:
                continue
            with contextlib.suppress(Conflict):
                await self.finish(address, seen.generation, NOBODY, REGISTRY)
                count += 1
        return count

    async def _first_gone(self, address: TagAddress) -> str:
        """Why the pending targets are no longer valid; "" if they are."""
        seen = await self.tags.read(address)
        try:
            await self.tags.resolved(address, seen.pending if seen is not None else ())
        except (AdapterNotFound, NotCertified) as error:
            return error.message
        return ""

    async def _changed(
        self,
        address: TagAddress,
        step: Callable[[TagRecord | None], TagRecord | None],
        action_of: Callable[[TagRecord], str],
        actor: str,
    ) -> TagRecord:
        """Change a tag, and record `action_of(tag)` of the result in the audit log."""
        operation = await self.catalog.note_pending(address.scope)
        record = await documents.change(self.store, address.key, TagRecord, step)
        assert record is not None, "a stage writes a tag or finds one"
        await self.tags.note(address, record, action_of(record), actor, operation)
        return record


def _without_pending(record: TagRecord, reason: str) -> TagRecord:
    return dataclasses.replace(
        record,
        generation=record.generation + 1,
        pending=(),
        pending_reason=reason,
        pending_until_s=0.0,
        pending_mover="",
    )
