"""Publishing: the only way to create a version.

    session -> parts -> inspect -> blobs and intent -> version -> visibility
            -> tags and audit -> index and event -> acknowledgement

A version of an adapter that exists already enters the index while its tags move.
Nothing is visible before the version record, which is created only if there is none. After a crash
beyond this point, the next attempt of the client or of any registry completes the publication from
the intent. A crash before it leaves only unreferenced bytes for the garbage collector. Every step
can be repeated."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

from loraplex.adapter_format.serving_fields import ROPE_FIELD
from loraplex.errors import Blocked, Conflict, InvalidAdapter
from loraplex_services.common import documents
from loraplex_services.common.documents import Seen
from loraplex_services.common.objects import ObjectStore, ObjectStoreError
from loraplex_services.registry import layout
from loraplex_services.registry.access.audit import Audit
from loraplex_services.registry.access.sharing import VISIBILITY_NAMES, SharingChange, shared
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.items import Item, adapter_item, scope_of, version_item
from loraplex_services.registry.index.versions import Versions
from loraplex_services.registry.publish.blobs import Blobs
from loraplex_services.registry.publish.claims import Claim, Claims, Draft, NumberTaken
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.inspection import (
    DamagedFile,
    FileSource,
    Inspector,
    Requirements,
)
from loraplex_services.registry.publish.metrics import UPLOADS
from loraplex_services.registry.publish.uploads import (
    Finished,
    Intent,
    Uploads,
    UploadSession,
)
from loraplex_services.registry.publish.version_tags import VersionTags
from loraplex_services.registry.records import (
    PRIVATE,
    AdapterRecord,
    BaseRecord,
    TagRecord,
    VersionRecord,
)

_MAX_TRIES = 5


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Publisher:
    """Creates versions from finished uploads."""

    store: ObjectStore
    catalog: Catalog
    uploads: Uploads
    blobs: Blobs
    inspector: Inspector
    version_tags: VersionTags
    versions: Versions
    claims: Claims
    audit: Audit

    async def finish(self, session: UploadSession) -> Finished:
        """Publish a session whose files are complete. Safe to repeat, also after a crash.

        Raises:
            Blocked: bytes are missing, or damaged in the store.
            InvalidAdapter: validation refused it; nothing was published.
            DataLoss: a file is not what was declared; its bytes must be sent again.
            ResourceExhausted: the tenant's quota is full.
            Unavailable: store or index is unreachable; nothing was acknowledged, try again.
        """
        done = await self.uploads.finished(session.upload_id)
        if done is not None:
            return done
        try:
            done = await self._finish(session)
        except (Blocked, ObjectStoreError):
            # The bytes may be gone because another call has finished the session meanwhile.
            done = await self.uploads.finished(session.upload_id)
            if done is None:
                raise
        return done

    async def _finish(self, session: UploadSession) -> Finished:
        """As `finish`, for a session that nobody finished yet."""
        sources = await self.blobs.sources(session)
        try:
            done = await self._publish(session, sources)
        except DamagedFile as error:
            await self._send_again(session, sources, error)
            raise
        except InvalidAdapter as error:
            await self.uploads.refuse(session, error.violations)
            await self._forget(session)
            raise
        await self._forget(session)
        return done

    async def publish(
        self,
        session: UploadSession,
        contents: Mapping[str, bytes],
        bases: Sequence[BaseRecord] = (),
    ) -> Finished:
        """Publish an adapter that came in one call. Safe to repeat, also after a crash.

        Args:
            contents: the bytes of each file by its path, of the sizes that were declared.
            bases: what `Bases.check_upload` has just returned.

        Raises:
            InvalidAdapter, ResourceExhausted, Unavailable: as `finish`.
            DataLoss: a file is not what was declared.
        """
        sources = [FileSource(file, (), "", contents[file.path]) for file in session.files]
        return await self._publish(session, sources, bases)

    async def _forget(self, session: UploadSession) -> None:
        """The upload no longer counts as unfinished."""
        open_uploads = self.catalog.open_uploads
        await open_uploads.forget(session.options.tenant, session.fingerprint)

    async def _publish(
        self,
        session: UploadSession,
        sources: Sequence[FileSource],
        bases: Sequence[BaseRecord] = (),
    ) -> Finished:
        """Raises DamagedFile, InvalidAdapter, ResourceExhausted, Unavailable."""
        options = session.options
        inspected = await self.inspector.inspect(
            sources,
            Requirements(
                options.tenant,
                options.base_id,
                options.strict,
                (options.labels or {}).get(ROPE_FIELD, ""),
                options.allow_missing,
                tuple(bases),
            ),
        )
        failpoint("publish.inspected")
        files = [source.file for source in sources]
        draft, operation = await asyncio.gather(
            self.claims.draft(session, inspected, files),
            self.catalog.note_pending(scope_of(options.tenant, options.name)),
        )
        failpoint("publish.pending")
        # The disk writes the intent at the same time: neither refers to the other.
        stored = asyncio.create_task(self.blobs.keep(sources, inspected, session))
        try:
            for _ in range(_MAX_TRIES):
                finished = await self._claimed(session, draft, operation, stored)
                if finished is not None:
                    return finished
                draft = await self.claims.draft_again(session, draft)
        finally:
            stored.cancel()
            await asyncio.wait([stored])
        raise Conflict("the version is deleted repeatedly while it is published; try again later")

    async def _claimed(
        self, session: UploadSession, draft: Draft, operation: str, stored: asyncio.Task[None]
    ) -> Finished | None:
        """Give the content its version, and do all that follows. The writes that follow are
        prepared on the disk in the meantime, and appear once the version exists.

        Returns None if the version was deleted in the meantime: the content needs a new number.
        """
        while True:
            claim = draft.claim(session)
            work = self.claims.carry_out(session, draft, claim, stored)
            claiming = asyncio.create_task(work)
            try:
                if not session.is_durable:
                    await claiming
                return await self._make_visible(
                    session, claim, operation, tags=draft.tags, after=claiming
                )
            except NumberTaken:
                draft = await self.claims.draft_again(session, draft)
            finally:
                claiming.cancel()
                await asyncio.wait([claiming])

    async def _send_again(
        self, session: UploadSession, sources: Sequence[FileSource], damage: DamagedFile
    ) -> None:
        """Drop bytes that differ from the declared ones. Raises Blocked if the client did not have
        to send them, so that it opens the session again and sends them."""
        [source] = [source for source in sources if source.file.path == damage.path]
        sha256 = source.file.sha256
        if [segment.key for segment in source.segments] != [layout.blob(sha256)]:
            return await self.uploads.reopen(session.upload_id, damage.path)
        await self.uploads.mark_damaged(session, sha256)
        message = f"{damage.path} is damaged in the store; send it again"
        raise Blocked(message, reason="UPLOAD_INCOMPLETE") from damage

    async def recover(self, upload_id: str) -> bool:
        """Complete a publication that died after its version record; returns whether there was one.

        Tags move only if they were not moved since the publication began.
        """
        intent = await self.uploads.intent(upload_id)
        if intent is None:
            return False
        session = intent.session or await self.uploads.get(upload_id)
        version = await self._intended_version(session, intent)
        if version is None:
            return False
        operation = await self.catalog.note_pending(scope_of(version.tenant, version.name))
        claim = Claim(version, version.upload_id == upload_id, exists=True)
        finished = await self._make_visible(session, claim, operation, tags={}, recovering=intent)
        return finished is not None

    async def _intended_version(
        self, session: UploadSession, intent: Intent
    ) -> VersionRecord | None:
        options = session.options
        if intent.version:
            key = layout.version(options.tenant, options.name, intent.version)
            found = await documents.read(self.store, key, VersionRecord)
            return found if found is not None and not found.deleted else None
        for record in await self.versions.of(options.tenant, options.name):
            if record.upload_id == session.upload_id and not record.deleted:
                return record
        return None

    async def _make_visible(
        self,
        session: UploadSession,
        claim: Claim,
        operation: str,
        *,
        tags: Mapping[str, Seen[TagRecord]],
        after: asyncio.Task[None] | None = None,
        recovering: Intent | None = None,
    ) -> Finished | None:
        """Everything after the version record: visibility, tags, audit, index, acknowledgement.

        Args:
            after: done when the version is there.

        Returns None if the version was deleted in the meantime: the content needs a new number.

        Raises: as `after`.
        """
        version, created = claim.version, claim.created
        announcing = asyncio.create_task(self._announce(session, claim, after))
        if session.options.visibility:
            await announcing
        after = None if after is None or after.done() else after
        # Any may come first: a publication without an acknowledgement is completed again.
        (adapter, items), moved, _ = await asyncio.gather(
            announcing,
            self.version_tags.move(session, claim, tags, after, recovering),
            self._note(session, claim, after),
        )
        failpoint("publish.audit")
        now = await self.versions.read(version.tenant, version.name, version.version)
        if now is None or now.deleted:
            return None
        scope = scope_of(version.tenant, version.name)
        indexing = self.catalog.apply(scope, items + moved, operation=operation)
        finished = Finished(version, adapter, created)
        if session.in_one_call:
            # From here on, the note of the operation is enough: only the index may be behind.
            await asyncio.gather(indexing, self.uploads.drop_intent(session))
            failpoint("publish.index")
        else:
            await indexing
            failpoint("publish.index")
            await self.uploads.finish(session, finished)
        UPLOADS.labels("created" if created else "unchanged").inc()
        return finished

    async def _announce(
        self, session: UploadSession, claim: Claim, after: asyncio.Task[None] | None
    ) -> tuple[AdapterRecord | None, list[Item]]:
        """Set the visibility, and bring an update of an adapter into the index before its tags are
        on the disk: workers load it in the meantime for requests that follow one of them.

        Returns the adapter's record and what the index is to have of adapter and version.
        """
        if after is not None:
            await asyncio.shield(after)
        version, items = claim.version, list[Item]()
        adapter = await self._set_visibility(session, items)
        failpoint("publish.visibility")
        items.append(version_item(version, adapter))
        if claim.created and version.version > 1 and not version.expires_s:
            await self.catalog.apply(scope_of(version.tenant, version.name), items)
            items = []
        return adapter, items

    async def _note(
        self, session: UploadSession, claim: Claim, after: asyncio.Task[None] | None
    ) -> None:
        """Write to the audit log. Ephemeral versions share entries."""
        version, creator = claim.version, session.creator
        tenant = version.tenant
        action = "version.publish" if claim.created else "version.republish"
        if session.options.ttl_s:
            subject = f"{version.shown_name}:v{version.version}@{version.digest}"
            return await self.audit.write_shared(creator, tenant, action, subject)
        details = {"tags": " ".join(session.options.tags), "base": version.base_id}
        if session.options.visibility:
            details["visibility"] = VISIBILITY_NAMES[session.options.visibility]
        await self.audit.write_version(creator, action, version, after=after, **details)

    async def _set_visibility(
        self, session: UploadSession, items: list[Item]
    ) -> AdapterRecord | None:
        """Change the visibility if the upload requests it; returns the resulting record. Mutates:
        items, unless the index has the record."""
        options = session.options
        tenant, name, visibility = options.tenant, options.name, options.visibility

        def step(current: AdapterRecord | None) -> AdapterRecord | None:
            held = current or AdapterRecord(tenant, name, PRIVATE, generation=0)
            if visibility in (0, held.visibility):
                return None
            changed = shared(held, SharingChange(visibility))
            return dataclasses.replace(changed, generation=held.generation + 1)

        key = layout.adapter(tenant, name)
        adapter = await documents.change(self.store, key, AdapterRecord, step)
        if adapter is None:
            return None
        indexed = (await self.catalog.find(scope_of(tenant, name), "adapter")).adapter
        if indexed is None or indexed.generation < adapter.generation:
            items.append(adapter_item(adapter))
        return adapter
