"""From a digest to a verified folder on this machine. Runs in the door process.

Every byte is checked against the digest before it counts: the manifest against the digest itself,
each file against the manifest. Then the adapter is validated against this worker's base, as the
registry did against the base it knew. Hashing, writing and validating run in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from loraplex.adapter_format.files import File
from loraplex.adapter_format.folder import read_header_prefix
from loraplex.adapter_format.geometry import Geometry
from loraplex.adapter_format.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    digest_of,
    parse_manifest,
)
from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex.adapter_format.validate import validate
from loraplex.errors import AdapterNotFound, DataLoss, InvalidRequest, LoraplexError, Unavailable
from services.common.objects.store import ObjectMissing, ObjectStore, read_chunks
from services.worker.adapters.backoff import Backoff
from services.worker.adapters.disk import DiskAdapter, DiskCache

logger = logging.getLogger(__name__)

MAX_FETCHES = 8
"""Adapters fetched at the same time."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class AdapterSource:
    """Fetches adapters by digest into the disk cache, each at most once at a time."""

    def __init__(
        self,
        store: ObjectStore,
        disk: DiskCache,
        max_rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._disk = disk
        self.geometry: Geometry | None = None
        """The base to validate against, once the engine has told."""
        self._max_rank = max_rank
        self._clock = clock
        self._backoff = Backoff()
        self._flights: dict[str, asyncio.Task[DiskAdapter]] = {}
        self._limit = asyncio.Semaphore(MAX_FETCHES)

    async def ensure(self, digest: str) -> DiskAdapter:
        """The adapter on disk, fetched if need be. Concurrent callers share one fetch.

        Raises:
            AdapterNotFound: no manifest has this digest.
            DataLoss: bytes in the store do not match the digest.
            InvalidAdapter: not for this base, or over the rank limit.
            Unavailable: the object store cannot be reached.
        """
        if (adapter := self._disk.get(digest)) is not None:
            return adapter
        if (error := self._backoff.blocked(digest, self._clock())) is not None:
            raise error
        if digest not in self._flights:
            flight = asyncio.create_task(self._fly(digest))
            self._flights[digest] = flight
            flight.add_done_callback(lambda done: self._landed(digest, done))
        return await asyncio.shield(self._flights[digest])

    async def close(self) -> None:
        """Stop fetching."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await self._store.close()

    def _landed(self, digest: str, flight: asyncio.Task[DiskAdapter]) -> None:
        del self._flights[digest]
        if not flight.cancelled():
            flight.exception()  # every caller may have gone: then nobody else asks for it

    async def _fly(self, digest: str) -> DiskAdapter:
        """One fetch; failures are remembered and paused upon."""
        begin_s = self._clock()
        try:
            async with self._limit:
                adapter = await self._fetch(digest)
        except Exception as failure:
            error = _typed(failure, digest)
            self._backoff.record(digest, error, self._clock())
            logger.warning("fetch failed", extra={"digest": digest, "reason": error.reason})
            raise error from failure
        self._backoff.clear(digest)
        elapsed_s = round(self._clock() - begin_s, 3)
        logger.info("fetched", extra={"digest": digest, "elapsed_s": elapsed_s})
        return adapter

    async def _fetch(self, digest: str) -> DiskAdapter:
        raw = await self._manifest(digest)
        manifest = parse_manifest(raw)
        if [file.path for file in manifest.files] != [TENSOR_FILE]:
            raise DataLoss(f"the manifest of {digest} lists files this build does not know")
        self._disk.check_room(digest, manifest)
        folder = self._disk.begin()
        try:
            for file in manifest.files:
                await self._file(file, folder)
            await asyncio.to_thread(self._validate, folder, manifest)
            return self._disk.commit(folder, raw, manifest)
        except DataLoss:
            self._disk.quarantine(folder, digest)
            raise
        finally:
            self._disk.discard(folder)

    async def _manifest(self, digest: str) -> bytes:
        check_digest(digest)
        try:
            raw = await self._store.get_range(blob_key(digest), 0, MAX_MANIFEST_BYTES + 1)
        except ObjectMissing:
            raise AdapterNotFound(digest, "the object store has no such manifest") from None
        if digest_of(raw) != digest:
            raise DataLoss(f"the stored manifest of {digest} does not match its digest")
        return raw

    async def _file(self, file: File, folder: Path) -> None:
        """Stream one file into `folder`. Raises DataLoss unless size and sha256 are right."""
        hasher = hashlib.sha256()
        with (folder / file.path).open("wb") as target:

            def absorb(chunk: bytes) -> None:
                hasher.update(chunk)
                target.write(chunk)

            try:
                async for chunk in read_chunks(self._store, blob_key(file.sha256), 0, file.size):
                    await asyncio.to_thread(absorb, chunk)
            except ObjectMissing:
                raise DataLoss(f"the object store lost blob {file.sha256}") from None
        if hasher.hexdigest() != file.sha256:
            raise DataLoss(f"stored bytes of blob {file.sha256} do not match it")

    def _validate(self, folder: Path, manifest: Manifest) -> None:
        path = folder / TENSOR_FILE
        validate(
            manifest.config_bytes,
            read_header_prefix(path),
            path.stat().st_size,
            (),
            self.geometry,
            self._max_rank,
        )


def check_digest(digest: str) -> None:
    """Raises InvalidRequest unless `digest` is spelled like one."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequest.field(
            "adapters.digest", digest, "must be sha256: and 64 lower-case hex digits"
        )


def blob_key(sha256: str) -> str:
    """Key of a blob, by its hash with or without the prefix."""
    digits = sha256.removeprefix("sha256:")
    return f"blobs/sha256/{digits[:2]}/{digits}"


def _typed(failure: Exception, digest: str) -> LoraplexError:
    if isinstance(failure, LoraplexError):
        return failure
    logger.error("fetch broke", exc_info=failure, extra={"digest": digest})
    return Unavailable(f"adapter {digest} could not be fetched", reason="FETCH_FAILED")
