"""Upload sessions, kept in the object store so that any replica can continue them.

A file arrives as parts, in any order. A part is named by its offset, size and sha256, so listing
the parts of a session shows how far it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from loraplex.adapter_format import TENSOR_FILE, File
from loraplex.errors import InvalidRequest, NotFound, Violation
from loraplex_services.common import documents
from loraplex_services.common.callers import note_read
from loraplex_services.common.documents import encode
from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry import layout
from loraplex_services.registry.publish.failpoint import failpoint
from loraplex_services.registry.publish.file_state import FileState, UploadPart
from loraplex_services.registry.publish.part_writer import MAX_PART_BYTES, PartWriter, damaged
from loraplex_services.registry.publish.scanning import ArrivingScan, Scans
from loraplex_services.registry.records import AdapterRecord, SignatureRecord, VersionRecord, now_s

MAX_CHUNK_BYTES = 1 << 20
SESSION_MAX_AGE_S = 24 * 3600.0
_REUSE_MAX_AGE_S = SESSION_MAX_AGE_S / 2
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}", re.ASCII)
_PARTS_PER_DOCUMENT = 10
"""Parts that cost as much as a document: they are listed and not read."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options with which the client asked for an upload."""

    tenant: str
    name: str
    tags: tuple[str, ...]
    """Tags to move, including `latest` unless it is to stay."""
    base_id: str = ""
    visibility: int = 0
    """Visibility of the adapter; 0 keeps it."""
    labels: dict[str, str] | None = None
    strict: bool = False
    allow_missing: bool = False
    parent: str = ""
    when_loaded_s: float = 0.0
    keep_versions: int = 0
    """Above 0: older versions that were published with this option are retired."""
    spelling: str = ""
    """The name as the client spelled it."""
    ttl_s: float = 0.0
    """Above 0: the version is ephemeral."""
    signatures: tuple[SignatureRecord, ...] = ()
    """Checked signatures, to be kept with the version."""


@dataclass(frozen=True, slots=True)
class UploadSession:
    """An upload: the declared files and options, and the caller."""

    upload_id: str
    options: Options
    files: tuple[File, ...]
    creator: str
    created_s: float
    known: tuple[str, ...] = ()
    """sha256 of files that the tenant referred to already when the session opened. Kept here, so
    that files which the client need not send stay known if the index is lost."""
    damaged: tuple[str, ...] = ()
    """sha256 of files whose stored bytes were found to be damaged; they are sent again and
    replaced."""
    in_one_call: bool = False
    """Whether the bytes came with the options. Nothing of such an upload is stored but its intent,
    while it is published."""
    has_room: bool = False
    """Whether the tenant's quota was checked a moment ago."""

    @property
    def has_intent(self) -> bool:
        """Whether another registry completes it after a crash. Otherwise, a version without an
        acknowledgement may stay without a tag until it expires."""
        return self.is_durable or not self.in_one_call

    @property
    def intent_key(self) -> str:
        """Key of the intent. That of an upload in one call needs no folder, whose name would have
        to be made durable, too."""
        key = layout.lone_intent if self.in_one_call else layout.upload_intent
        return key(self.upload_id)

    @property
    def is_durable(self) -> bool:
        """Whether its acknowledgement waits until the disk has everything."""
        return not self.options.ttl_s

    @property
    def fingerprint(self) -> str:
        """A fingerprint that equal uploads of one caller share."""
        return self.upload_id.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Intent:
    """The changes that a publication is about to make visible."""

    digest: str
    version: int
    """The existing version that has this content; 0 if a new one is made."""
    tag_generations: dict[str, int]
    """Generation of each tag before its move."""
    session: UploadSession | None = None
    """The session, if it has no document of its own."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The acknowledgement, kept for clients that ask again."""

    version: VersionRecord
    adapter: AdapterRecord | None
    created: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why validation refused the bytes that were sent, kept for clients that ask again."""

    violations: tuple[Violation, ...]


class Uploads:
    """All sessions of a store."""

    def __init__(self, store: ObjectStore, scans: Scans) -> None:
        self._store = store
        self._scans = scans

    async def open(
        self, options: Options, files: Sequence[File], creator: str, known: Sequence[str] = ()
    ) -> UploadSession:
        """Open a session, or return the open one for the same files and options.

        Args:
            known: sha256 of the files that the tenant refers to already.
        """
        ordered = tuple(sorted(files, key=lambda file: file.path))
        same = fingerprint(options, files, creator)
        now_s = await self._store.clock_s()
        found = await self._open_session(same, now_s)
        if found is not None:
            return found
        upload_id = f"{same}-{secrets.token_hex(8)}"
        session = UploadSession(upload_id, options, ordered, creator, now_s, tuple(known))
        await documents.create(self._store, layout.upload_session(session.upload_id), session)
        failpoint("upload.session")
        return session

    @staticmethod
    def in_one_call(
        options: Options, files: Sequence[File], creator: str, request_id: str
    ) -> UploadSession:
        """A session that is not stored. It has the same id if the call is repeated."""
        upload_id = f"{fingerprint(options, files, creator)}-{request_id}"
        files = tuple(sorted(files, key=lambda file: file.path))
        return UploadSession(upload_id, options, files, creator, now_s(), in_one_call=True)

    async def get(self, upload_id: str) -> UploadSession:
        """The session of an id. Raises NotFound."""
        session = None
        if _UPLOAD_ID.fullmatch(upload_id):
            session = await documents.read(
                self._store, layout.upload_session(upload_id), UploadSession
            )
        if session is None:
            raise no_upload(upload_id)
        return session

    async def state(self, session: UploadSession) -> list[FileState]:
        """The committed bytes of each file."""
        prefix = layout.upload_parts(session.upload_id)
        parts: dict[int, list[UploadPart]] = {}
        async for info in self._store.list_objects(prefix):
            index, name = info.key.removeprefix(prefix).split("/")
            offset, size, sha256 = name.split("-")
            parts.setdefault(int(index), []).append(
                UploadPart(info.key, int(offset), int(size), sha256)
            )
        note_read.get()(sum(map(len, parts.values())) // _PARTS_PER_DOCUMENT)
        return [FileState(file, parts.get(index, ())) for index, file in enumerate(session.files)]

    async def receive(
        self,
        session: UploadSession,
        path: str,
        offset: int,
        chunks: AsyncIterator[tuple[bytes, int]],
    ) -> FileState:
        """Store the bytes of one file from `offset` on; returns the state of the file.

        Bytes that arrived before a stream broke are kept. Bytes that are stored already are
        skipped, and where more of them follow, the rest is not read: no byte is stored twice
        however many streams follow each other.

        Args:
            chunks: (data, crc32 of data) in order.

        Raises:
            InvalidRequest: an unknown path, too much data.
            DataLoss: a chunk does not match its crc32.
        """
        index, state = await self._file_state(session, path)
        begin, end = state.gap(offset)
        skip = begin - offset
        scan = _scan_of(state.file) if begin == 0 else None
        writer = PartWriter(self._store, session.upload_id, index, begin, scan)
        try:
            async for data, crc32 in chunks:
                if len(data) > MAX_CHUNK_BYTES:
                    description = "chunks are at most 1 MiB"
                    raise InvalidRequest.field("data", f"{len(data)} bytes", description)
                offset += len(data)
                if offset > state.file.size:
                    description = "is more than was declared"
                    raise InvalidRequest.field("data", f"{offset} bytes", description)
                fresh = data[skip : skip + end - writer.end]
                if len(fresh) < len(data):
                    if zlib.crc32(data) != crc32:
                        raise damaged()
                    crc32 = zlib.crc32(fresh)
                skip = max(0, skip - len(data))
                await writer.write(fresh, crc32)
                if writer.end == end < state.file.size:
                    break
        finally:
            await writer.finish()
        state = (await self._file_state(session, path))[1]
        if scan is not None and state.known_sha256:
            zero_tensors = await asyncio.to_thread(scan.finish)
            if zero_tensors is not None:
                self._scans.remember(state.known_sha256, zero_tensors)
        return state

    async def _file_state(self, session: UploadSession, path: str) -> tuple[int, FileState]:
        for index, state in enumerate(await self.state(session)):
            if state.file.path == path:
                return index, state
        known = ", ".join(file.path for file in session.files)
        raise InvalidRequest.field("path", path, f"is not a file of this upload; it has {known}")

    async def finished(self, upload_id: str) -> Finished | None:
        """The acknowledgement, if the session is published."""
        return await documents.read(self._store, layout.upload_finished(upload_id), Finished)

    async def intent(self, upload_id: str) -> Intent | None:
        """The last intent of the session, if there is one."""
        for key in (layout.lone_intent(upload_id), layout.upload_intent(upload_id)):
            intent = await documents.read(self._store, key, Intent)
            if intent is not None:
                return intent
        return None

    async def intend(self, session: UploadSession, intent: Intent) -> None:
        """Record what is about to become visible, replacing an earlier intent."""
        if not session.has_intent:
            return
        held = replace(intent, session=session) if session.in_one_call else intent
        await self._store.put(session.intent_key, encode(held))

    async def drop_intent(self, session: UploadSession) -> None:
        """Remove all traces of an upload in one call once its tags have moved. If the client
        repeats the call, the version with its content is found."""
        if session.has_intent:
            await self._store.delete(session.intent_key, durable=False)
        failpoint("publish.finished")

    async def finish(self, session: UploadSession, finished: Finished) -> None:
        """Record the acknowledgement and delete the parts."""
        upload_id = session.upload_id
        await documents.create(self._store, layout.upload_finished(upload_id), finished)
        failpoint("publish.finished")
        prefix = layout.upload_parts(upload_id)
        parts = [info.key async for info in self._store.list_objects(prefix)]
        await asyncio.gather(*map(self._store.delete, parts))

    async def refuse(self, session: UploadSession, violations: Sequence[Violation]) -> None:
        """Record a refusal and drop the bytes, which are of no further use. If they are sent again,
        they are checked again, because another base may be known by then."""
        refusal = Refusal(tuple(violations))
        await self._store.put(layout.upload_refused(session.upload_id), encode(refusal))
        for file in session.files:
            await self.reopen(session.upload_id, file.path)

    async def refusal(self, upload_id: str) -> Refusal | None:
        """The last refusal of this session."""
        return await documents.read(self._store, layout.upload_refused(upload_id), Refusal)

    async def reopen(self, upload_id: str, path: str) -> None:
        """Drop the parts of a file whose content is not what was declared."""
        index, _ = await self._file_state(await self.get(upload_id), path)
        async for info in self._store.list_objects(f"{layout.upload_parts(upload_id)}{index:03d}/"):
            await self._store.delete(info.key)

    async def mark_damaged(self, session: UploadSession, sha256: str) -> None:
        """Require a file whose blob in the store is damaged to be sent again."""
        wanting = replace(session, damaged=(*session.damaged, sha256))
        await self._store.put(layout.upload_session(session.upload_id), encode(wanting))

    async def unfinished(self) -> list[str]:
        """Ids of sessions that intended to publish and were not acknowledged."""
        intended, finished = set(), set()
        async for info in self._store.list_objects(layout.UPLOADS):
            upload_id, _, rest = info.key.removeprefix(layout.UPLOADS).partition("/")
            if rest == "intent.json":
                intended.add(upload_id)
            elif rest == "finished.json":
                finished.add(upload_id)
            elif not rest:
                intended.add(upload_id.removesuffix(".json"))
        return sorted(intended - finished)

    async def _open_session(self, same: str, now_s: float) -> UploadSession | None:
        keys = [info.key async for info in self._store.list_objects(f"{layout.UPLOADS}{same}-")]
        for key in keys:
            folder = key.removesuffix("session.json")
            if key == folder or f"{folder}finished.json" in keys:
                continue
            session = await documents.read(self._store, key, UploadSession)
            if session is not None and now_s - session.created_s < _REUSE_MAX_AGE_S:
                return session
        return None


def _scan_of(file: File) -> ArrivingScan | None:
    """A scan to feed while the file arrives, where it may arrive as one part."""
    one_part = file.path == TENSOR_FILE and file.size <= MAX_PART_BYTES
    return ArrivingScan(file.size) if one_part else None


def no_upload(upload_id: str) -> NotFound:
    """The error for an id without an upload that the caller may see."""
    return NotFound(f"no upload {upload_id!r}: it does not exist or has expired; start it again")


def fingerprint(options: Options, files: Sequence[File], creator: str) -> str:
    """A hash that is equal for equal uploads by one caller: the same files with the same options.

    All options count. An upload that shared the session of another one would get its options, such
    as the time after which the version is deleted.
    """
    ordered = replace(
        options,
        tags=tuple(sorted(options.tags)),
        labels=dict(sorted((options.labels or {}).items())),
        signatures=(),
    )
    signers = sorted(signature.key_sha256 for signature in options.signatures)
    text = repr((ordered, sorted(files, key=lambda file: file.path), creator, signers))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
