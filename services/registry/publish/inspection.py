"""Checks the content of an upload: config, header and every tensor value, in constant memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from loraplex.adapter_format import (
    CONFIG_FILE,
    TENSOR_FILE,
    File,
    Header,
    Report,
    core_manifest,
    digest_of,
    prefix_bytes,
)
from loraplex.adapter_format.config import MAX_CONFIG_BYTES
from loraplex.adapter_format.safetensors_header import LENGTH_BYTES
from loraplex.adapter_format.serving_fields import GENERATION_FILE, complete_config
from loraplex.adapter_format.strict_json import read_object
from loraplex.adapter_format.tensor_scan import TensorScan, warnings_of_zeros
from loraplex.errors import DataLoss, InvalidAdapter, Violation
from loraplex_services.common.objects import ObjectStore, Segment, read_chunks
from loraplex_services.registry.publish.bases import Bases
from loraplex_services.registry.publish.scanning import Scans
from loraplex_services.registry.publish.validation import Validations
from loraplex_services.registry.publish.validation_process import ValidationJob
from loraplex_services.registry.records import BaseRecord

DEFAULT_MAX_RANK = 256
_SMALL_BYTES = 64 << 10
"""Files up to this size, of at most some hundred tensors, are not worth a thread."""
_SMALL_CONFIG_BYTES = 4 << 10

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class FileSource:
    """Where the bytes of one declared file are."""

    file: File
    segments: tuple[Segment, ...]
    known_sha256: str
    """The sha256 that the content is known to have; "" = it must be read."""
    content: bytes | None = None
    """The bytes themselves, if they are in memory and not in the store."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """An adapter that may be published."""

    base: BaseRecord
    report: Report
    manifest: bytes
    digest: str
    warnings: tuple[Violation, ...]


class DamagedFile(DataLoss):
    """The received bytes differ from the declared ones."""

    def __init__(self, file: File) -> None:
        super().__init__(
            f"{file.path} does not match its declared sha256 {file.sha256}: it changed while it "
            "was read, or was damaged on the way; upload it again"
        )
        self.path = file.path


@dataclass(frozen=True, slots=True)
class Requirements:
    """What an uploaded adapter has to fulfil."""

    tenant: str
    """Tenant that publishes the adapter."""
    base_id: str
    """"" = as its config says."""
    strict: bool
    """Whether warnings refuse it."""
    rope_label: str = ""
    """The label in the form that `complete_config` takes."""
    allow_missing: bool = False
    """Whether modules that its config selects may have no tensors."""
    bases: tuple[BaseRecord, ...] = ()
    """Every base without its modules, if they have just been read."""


@dataclass(frozen=True, slots=True, eq=False)
class Inspector:
    """Validates adapters."""

    store: ObjectStore
    bases: Bases
    scans: Scans
    validations: Validations

    async def inspect(self, sources: Sequence[FileSource], wanted: Requirements) -> Inspected:
        """Validate an adapter from its stored bytes.

        Raises:
            InvalidAdapter: with every violation.
            DamagedFile: a file does not match its sha256.
            Unavailable: no base is known.
        """
        try:
            return await self._inspect(sources, wanted)
        except InvalidAdapter:
            # Damaged bytes look like a bad adapter; the cause comes before its effects.
            for source in sources:
                await _verify(self.store, source, None)
            raise

    async def _inspect(self, sources: Sequence[FileSource], wanted: Requirements) -> Inspected:
        by_path = {source.file.path: source for source in sources}
        config_bytes = await _whole(self.store, by_path[CONFIG_FILE])
        other = by_path.get(GENERATION_FILE)
        config_bytes = complete_config(
            config_bytes,
            generation_config=None if other is None else await _whole(self.store, other),
            rope_label=wanted.rope_label,
        )
        tensors = by_path[TENSOR_FILE]
        first = await _read(self.store, tensors, 0, LENGTH_BYTES)
        num_bytes = prefix_bytes(first, tensors.file.size)
        header_bytes = await _read(self.store, tensors, 0, num_bytes)
        files = [source.file for source in sources]
        base, report, header, warnings = await self.check(config_bytes, header_bytes, files, wanted)
        zero_tensors = self.scans.zero_tensors(tensors.known_sha256)
        scan = TensorScan(header) if zero_tensors is None else None
        for source in sources:
            await _verify(self.store, source, scan.feed if scan and source is tensors else None)
        if scan is not None:
            zero_tensors = scan.finish()
        warnings = (*warnings, *warnings_of_zeros(report, zero_tensors or frozenset()))
        _refuse_if_strict(warnings, wanted.strict)
        manifest = core_manifest(report, files, base.geometry.fingerprint)
        return Inspected(base, report, manifest, digest_of(manifest), warnings)

    async def check(
        self, config_bytes: bytes, header_bytes: bytes, files: Sequence[File], wanted: Requirements
    ) -> tuple[BaseRecord, Report, Header, tuple[Violation, ...]]:
        """Validate config and header against the base that the adapter is for."""
        size = next((file.size for file in files if file.path == TENSOR_FILE), len(header_bytes))
        is_small = len(config_bytes) <= _SMALL_CONFIG_BYTES
        named = await _run(partial(_base_name, config_bytes), is_small=is_small)
        base, warnings = await self.bases.choose(wanted.base_id, named, wanted.bases)
        job = ValidationJob(
            config_bytes,
            header_bytes,
            size,
            tuple(files),
            base.geometry,
            base.max_lora_rank or DEFAULT_MAX_RANK,
            wanted.strict,
            (base.base_id, *base.aliases),
            wanted.allow_missing,
        )
        report, header = await self.validations.check(wanted.tenant, job)
        found = (*report.warnings, *warnings)
        _refuse_if_strict(found, wanted.strict)
        return base, report, header, found


def _base_name(config_bytes: bytes) -> str:
    """`base_model_name_or_path` of a config, which may be wrong in all other fields: to read its
    expressions can take seconds.

    Raises: InvalidAdapter if it is not a JSON object.
    """
    name = read_object(config_bytes, CONFIG_FILE, MAX_CONFIG_BYTES).get("base_model_name_or_path")
    return name if isinstance(name, str) else ""


def _refuse_if_strict(warnings: Sequence[Violation], strict: bool) -> None:
    if strict and warnings:
        raise InvalidAdapter.of(warnings)


async def _verify(
    store: ObjectStore, source: FileSource, feed: Callable[[bytes], None] | None
) -> None:
    """Read a file once: hash it unless its hash is known, and hand its bytes to `feed`."""
    if source.known_sha256:
        if source.known_sha256 != source.file.sha256:
            raise DamagedFile(source.file)
        if feed is None:
            return
    hasher = None if source.known_sha256 else hashlib.sha256()
    async for chunk in _chunks(store, source):
        digest = partial(_digest_chunk, chunk, hasher, feed)
        await _run(digest, is_small=source.file.size <= _SMALL_BYTES)
    if hasher is not None and hasher.hexdigest() != source.file.sha256:
        raise DamagedFile(source.file)


async def _run(work: Callable[[], R], *, is_small: bool) -> R:
    """Do work with a file, in a thread unless it is small."""
    return work() if is_small else await asyncio.to_thread(work)


def _digest_chunk(
    chunk: bytes, hasher: hashlib._Hash | None, feed: Callable[[bytes], None] | None
) -> None:
    if hasher is not None:
        hasher.update(chunk)
    if feed is not None:
        feed(chunk)


async def _chunks(store: ObjectStore, source: FileSource) -> AsyncIterator[bytes]:
    if source.content is not None:
        yield source.content
    for segment in source.segments:
        async for chunk in read_chunks(store, segment.key, segment.offset, segment.length):
            yield chunk


async def _whole(store: ObjectStore, source: FileSource) -> bytes:
    """The content of a small file."""
    return await _read(store, source, 0, source.file.size)


async def _read(store: ObjectStore, source: FileSource, offset: int, length: int) -> bytes:
    """A range of bytes of a file, across its segments."""
    if source.content is not None:
        return source.content[offset : offset + length]
    data = bytearray()
    for segment in source.segments:
        if offset < segment.length and len(data) < length:
            take = min(segment.length - offset, length - len(data))
            async for chunk in read_chunks(store, segment.key, segment.offset + offset, take):
                data += chunk
        offset = max(0, offset - segment.length)
    return bytes(data)
