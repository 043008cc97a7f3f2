"""Gives the content of an upload its version: an existing one, or one with a new number."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapter_format import File
from loraplex.errors import ResourceExhausted
from loraplex_services.common import documents
from loraplex_services.common.documents import Seen
from loraplex_services.common.limits import MAX_VERSIONS_PER_ADAPTER
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.access.tenants import Tenants
from loraplex_services.registry.index.versions import Versions
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.inspection import Inspected
from loraplex_services.registry.publish.tags import TagAddress, Tags
from loraplex_services.registry.publish.uploads import Intent, Options, Uploads, UploadSession
from loraplex_services.registry.records import TagRecord, VersionRecord, now_s


class NumberTaken(Exception):
    """Another publication created a version with this number."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The version of an upload's content."""

    version: VersionRecord
    created: bool
    """Whether this upload creates it, or has created it before."""
    exists: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A version that has no number yet, and what its number depends on."""

    record: VersionRecord
    last: int
    """Highest number of the adapter's versions."""
    num_live: int
    """How many of them are not deleted."""
    records: list[VersionRecord]
    """As `Versions.of_content` returns them."""
    tags: dict[str, Seen[TagRecord]]
    """The tags that the publication moves, as they are before it; none without an intent."""

    def claim(self, session: UploadSession) -> Claim:
        """The newest version that has the same content for as long as is asked, or else a new
        one, created now.

        Only one of several publications at the same time gets the next number, and the others draft
        again. So none of them exceeds the limit.

        Raises: ResourceExhausted if the adapter has too many versions for a new one.
        """
        options = session.options
        for record in reversed(self.records):
            if _same_content(record, self.record) and _lives_as_long(record, options):
                return Claim(record, record.upload_id == session.upload_id, exists=True)
        created_s = now_s()
        spelling = self.records[0].shown_name if self.records else options.spelling
        if self.num_live >= MAX_VERSIONS_PER_ADAPTER:
            why = (
                f"{options.tenant}/{spelling or options.name} has {self.num_live} versions, and an "
                f"adapter has at most {MAX_VERSIONS_PER_ADAPTER}; delete some with 'registry "
                "delete', or publish updates with keep_versions, which deletes older ones"
            )
            raise ResourceExhausted.field("name", options.name, why, reason="TOO_MANY_VERSIONS")
        record = dataclasses.replace(
            self.record,
            version=self.last + 1,
            created_s=created_s,
            expires_s=created_s + options.ttl_s if options.ttl_s else 0.0,
            spelling="" if spelling == options.name else spelling,
        )
        return Claim(record, True)


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """Creates version records."""

    store: ObjectStore
    uploads: Uploads
    tags: Tags
    versions: Versions
    tenants: Tenants

    async def draft(
        self, session: UploadSession, inspected: Inspected, files: Sequence[File]
    ) -> Draft:
        """Read what `claim` decides by. Changes nothing.

        Raises: ResourceExhausted if the adapter cannot have the publication's tags.
        """
        options = session.options
        record = _record(session, inspected, files)
        (last, num_live, records), tags, _ = await asyncio.gather(
            self.versions.of_content(options.tenant, options.name, record.digest),
            self._look_at_tags(session),
            self.tags.check_new(options.tenant, options.name, options.tags),
        )
        return Draft(record, last, num_live, records, tags)

    async def draft_again(self, session: UploadSession, draft: Draft) -> Draft:
        """The same by the objects, because the index may not know the newest version yet."""
        last, num_live, records = await self.versions.counted(
            session.options.tenant, session.options.name
        )
        tags = await self._look_at_tags(session)
        return Draft(draft.record, last, num_live, records, tags)

    async def carry_out(
        self, session: UploadSession, draft: Draft, claim: Claim, stored: asyncio.Task[None]
    ) -> None:
        """Create the version of a claim, unless it exists.

        Args:
            claim: of `draft`.
            stored: done when the bytes are in the store, on which the version waits.

        Raises: NumberTaken.
        """
        record = claim.version
        if not claim.exists and not session.has_room:
            limits = await self.tenants.get(record.tenant)
            await self.tenants.check_quota(limits, record.size_bytes)
        generations = {tag: _generation(seen) for tag, seen in draft.tags.items()}
        intent = Intent(record.digest, record.version if claim.exists else 0, generations)
        ready = asyncio.create_task(self._make_ready(session, intent, stored))
        try:
            if not claim.exists:
                await self._create(session, record, ready)
            await ready
        finally:
            ready.cancel()
        failpoint("publish.version")

    async def _make_ready(
        self, session: UploadSession, intent: Intent, stored: asyncio.Task[None]
    ) -> None:
        await self.uploads.intend(session, intent)
        failpoint("publish.intent")
        await asyncio.shield(stored)  # The next attempt needs it, if the number is taken.

    async def _create(
        self, session: UploadSession, record: VersionRecord, ready: asyncio.Task[None]
    ) -> None:
        """Create a version once the rest is ready. Its bytes go to the disk in the meantime, unless
        there is hardly anything to wait for. Raises: NumberTaken."""
        key, durable = (
            layout.version(record.tenant, record.name, record.version),
            session.is_durable,
        )
        if not durable:
            await ready
        after = ready if durable else None
        if not await documents.create(self.store, key, record, durable=durable, after=after):
            raise NumberTaken

    async def _look_at_tags(self, session: UploadSession) -> dict[str, Seen[TagRecord]]:
        """The tags as the intent saw them; none if there is no intent."""
        if not session.has_intent:
            return {}
        tenant, name, tags = session.options.tenant, session.options.name, session.options.tags
        addresses = [TagAddress(tenant, name, tag) for tag in tags]
        return dict(zip(tags, await asyncio.gather(*map(self.tags.look, addresses)), strict=True))


def _generation(seen: Seen[TagRecord]) -> int:
    return seen.found.record.generation if seen.found is not None else 0


def _record(session: UploadSession, inspected: Inspected, files: Sequence[File]) -> VersionRecord:
    options = session.options
    scaling = inspected.report.config.rope_scaling
    return VersionRecord(
        tenant=options.tenant,
        name=options.name,
        version=0,
        digest=inspected.digest,
        base_id=inspected.base.base_id,
        base_fingerprint=inspected.base.geometry.fingerprint,
        created_s=0.0,
        files=tuple(files),
        creator=session.creator,
        labels=dict(options.labels or {}),
        parent=options.parent,
        max_rank=inspected.report.max_rank,
        num_modules=inspected.report.num_modules,
        warnings=inspected.warnings,
        peft_version=inspected.report.config.peft_version or "",
        signers=tuple(sorted(s.key_sha256 for s in options.signatures if s.public_key)),
        upload_id=session.upload_id,
        task=inspected.report.config.task,
        pooling=inspected.report.pooling,
        rope_scaling=scaling.to_json() if scaling else "",
        eos_token_ids=inspected.report.config.eos_token_ids,
        keep_versions=options.keep_versions,
    )


def _same_content(record: VersionRecord, wanted: VersionRecord) -> bool:
    """Same digest, for the same base, and the same files that decoding does not need."""
    return (
        not record.deleted
        and record.digest == wanted.digest
        and record.base_id == wanted.base_id
        and _extra_files(record) == _extra_files(wanted)
    )


def _lives_as_long(record: VersionRecord, options: Options) -> bool:
    """Whether a version stays for as long as a publication asks, or half of its time to live."""
    if record.keep_versions and not (options.keep_versions or options.ttl_s):
        return False
    if not record.expires_s:
        return True
    return bool(options.ttl_s) and record.expires_s - now_s() >= options.ttl_s / 2


def _extra_files(record: VersionRecord) -> set[File]:
    return {file for file in record.files if file.path != "adapter_config.json"}
