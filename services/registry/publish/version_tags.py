"""Moves the tags of a publication to its version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound
from loraplex_services.common.documents import Seen
from loraplex_services.registry.index.items import Item
from loraplex_services.registry.index.versions import Versions
from loraplex_services.registry.publish.claims import Claim
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.staging import Staging
from loraplex_services.registry.publish.tags import TagAddress, Tags
from loraplex_services.registry.publish.uploads import Intent, UploadSession
from loraplex_services.registry.records import TagRecord, VersionRecord


@dataclass(frozen=True, slots=True, eq=False)
class VersionTags:
    """Moves or stages tags, once for each publication."""

    tags: Tags
    staging: Staging
    versions: Versions

    async def move(
        self,
        session: UploadSession,
        claim: Claim,
        tags: Mapping[str, Seen[TagRecord]],
        after: asyncio.Task[None] | None,
        recovering: Intent | None,
    ) -> list[Item]:
        """Move or stage the tags of a publication. Returns the entries for the index.

        Args:
            tags: as they were a moment ago.
            after: done when the version exists; the tags do not move before that.
            recovering: the intent, if an interrupted publication is repeated.
        """
        move = partial(self._move_or_stage, session, claim, after=after, recovering=recovering)
        moved = await asyncio.gather(*(move(tag, tags.get(tag)) for tag in session.options.tags))
        return [item for items in moved for item in items]

    async def _move_or_stage(
        self,
        session: UploadSession,
        claim: Claim,
        tag: str,
        seen: Seen[TagRecord] | None,
        *,
        after: asyncio.Task[None] | None,
        recovering: Intent | None,
    ) -> list[Item]:
        items: list[Item] = []
        if session.options.when_loaded_s:
            if after is not None:
                await asyncio.shield(after)
            await self._stage(session, tag, claim.version, recovering)
        else:
            record = await self._move(session, tag, claim, seen, after, recovering)
            if record is not None:
                items = await self.versions.items_of_tag(record, claim.version.version)
        failpoint("publish.tag")
        return items

    async def _move(
        self,
        session: UploadSession,
        tag: str,
        claim: Claim,
        seen: Seen[TagRecord] | None,
        after: asyncio.Task[None] | None,
        recovering: Intent | None,
    ) -> TagRecord | None:
        version, created = claim.version, claim.created
        target = TagTarget(version.version, version.digest)

        def choose(current: TagRecord | None) -> Sequence[TagTarget] | None:
            generation = current.generation if current is not None else 0
            if recovering and recovering.tag_generations.get(tag, 0) != generation:
                return None
            if created and current is not None and _is_newer(current, version.version):
                return None
            return [target]

        address = TagAddress(version.tenant, version.name, tag, version.shown_name)
        move_id = f"{session.upload_id}:v{version.version}"
        if seen is None and created and version.version == 1 and recovering is None:
            seen = Seen()  # Most likely there is no such tag yet.
        return await self.tags.move(
            address,
            choose,
            session.creator,
            move_id,
            durable=session.is_durable,
            seen=seen,
            after=after,
        )

    async def _stage(
        self, session: UploadSession, tag: str, version: VersionRecord, recovering: Intent | None
    ) -> None:
        """Stage a tag until workers have loaded the version, unless the tag is deleted."""
        address = TagAddress(version.tenant, version.name, tag, version.shown_name)
        if recovering is not None:
            current = await self.tags.read(address)
            generation = current.generation if current is not None else 0
            if recovering.tag_generations.get(tag, 0) != generation:
                return
        target = TagTarget(version.version, version.digest)
        with contextlib.suppress(AdapterNotFound):
            await self.staging.begin(
                address, [target], None, session.creator, session.options.when_loaded_s
            )


def _is_newer(current: TagRecord, version: int) -> bool:
    """Whether the publication of a newer version put the tag where it is.

    Only in that case is not moving it equivalent to having moved it just before. A direct move may
    have been made on the condition that the tag was not moved in between.
    """
    last = current.moves[-1]
    target = last.targets[0].version if last.targets else 0
    return target > version and last.move_id.endswith(f":v{target}")
