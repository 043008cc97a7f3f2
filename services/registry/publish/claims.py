"""Gives the content of an upload its version: an existing one, or one with a new number."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Sequence

from loraplex.adapter_format import File
from loraplex_services.common import documents
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.access.tenants import Tenants
from loraplex_services.registry.index.versions import Versions
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.inspection import Inspected
from loraplex_services.registry.publish.tags import TagAddress, Tags
from loraplex_services.registry.publish.uploads import Intent, Options, Uploads, UploadSession
from loraplex_services.registry.records import VersionRecord, now_s


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """Creates version records."""

    store: ObjectStore
    uploads: Uploads
    tags: Tags
    versions: Versions
    tenants: Tenants

    async def claim(
        self,
        session: UploadSession,
        inspected: Inspected,
        files: Sequence[File],
        stored: Awaitable[None],
    ) -> tuple[VersionRecord, bool]:
        """The version of this content: an existing one, or one with a new number.

        Args:
            stored: done when the bytes are in the store, on which the version waits.
        """
        options = session.options
        wanted = _record(session, inspected, files)
        adapter = options.tenant, options.name
        last, records = await self.versions.of_content(*adapter, wanted.digest)
        while True:
            same = next(
                (
                    record
                    for record in reversed(records)
                    if _same_content(record, wanted) and _lives_as_long(record, options)
                ),
                None,
            )
            generations = await self._tag_generations(session)
            if same is not None:
                intent = Intent(same.digest, same.version, generations)
                await self.uploads.intend(session, intent)
                await stored
                return same, same.upload_id == session.upload_id
            if not session.in_one_call:  # Its quota was checked a moment ago, when it began.
                limits = await self.tenants.get(options.tenant)
                await self.tenants.check_quota(limits, wanted.size_bytes)
            intent = Intent(wanted.digest, 0, generations)
            await self.uploads.intend(session, intent)
            failpoint("publish.intent")
            await stored
            created_s = now_s()
            expires_s = created_s + options.ttl_s if options.ttl_s else 0.0
            spelling = records[0].shown_name if records else options.spelling
            record = dataclasses.replace(
                wanted,
                version=last + 1,
                created_s=created_s,
                expires_s=expires_s,
                spelling="" if spelling == options.name else spelling,
            )
            key = layout.version(*adapter, last + 1)
            if await documents.create(self.store, key, record, durable=session.is_durable):
                return record, True
            records = await self.versions.of(*adapter)
            last = records[-1].version

    async def _tag_generations(self, session: UploadSession) -> dict[str, int]:
        """What the intent says about the tags, if there is one."""
        if not session.has_intent:
            return {}
        tenant, name = session.options.tenant, session.options.name
        tags = session.options.tags
        records = {tag: await self.tags.read(TagAddress(tenant, name, tag)) for tag in tags}
        return {tag: record.generation if record else 0 for tag, record in records.items()}


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
    """Same digest, and the same files that decoding does not need."""
    return (
        not record.deleted
        and record.digest == wanted.digest
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
