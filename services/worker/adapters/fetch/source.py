"""Turns a digest into a verified folder on this machine. Runs in the API server process.

The manifest is verified against the digest. Then a separate process (`pack_pool.py`) verifies the
tensors against the manifest, validates the adapter against this worker's base, and packs it into
the image that the engine copies, after which the tensors are deleted. Folders of an earlier run are
verified when they are first requested. An adapter that was packed for another layout is packed
again if its tensors are still there, and fetched again otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from loraplex.adapter_format.files import File
from loraplex.adapter_format.manifest import MAX_MANIFEST_BYTES, digest_of, parse_manifest
from loraplex.adapter_format.safetensors_header import TENSOR_FILE
from loraplex.errors import AdapterNotFound, DataLoss, LoraplexError, Unavailable
from loraplex.refs import check_digest
from loraplex_services.common.objects.store import ObjectMissing, ObjectStore, blob_key, read_chunks
from loraplex_services.worker.adapters.fetch.disk_cache import DiskAdapter, DiskCache
from loraplex_services.worker.adapters.fetch.fetch_limiter import FetchLimiter
from loraplex_services.worker.adapters.fetch.pack_pool import PackPool
from loraplex_services.worker.adapters.pack.image import image_path
from loraplex_services.worker.cache.backoff import Backoff

logger = logging.getLogger(__name__)

MAX_FETCHES = 8
"""Most adapters that are fetched at the same time."""
SMALL_BYTES = 64 << 10
"""Writing this many bytes takes less time than a thread takes to start."""


class AdapterSource:
    """Fetches adapters by digest into the disk cache, each at most once at a time."""

    def __init__(
        self,
        store: ObjectStore,
        disk: DiskCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._disk = disk
        self._pool: PackPool | None = None
        self._clock = clock
        self._backoff = Backoff()
        self._under_way: dict[str, asyncio.Task[DiskAdapter]] = {}
        self._limiter = FetchLimiter(MAX_FETCHES, disk.is_leased)
        self._closing: list[asyncio.Task[None]] = []

    def pack_with(self, pool: PackPool) -> None:
        """The processes that verify and pack, once the engine has reported its base."""
        old, self._pool = self._pool, pool
        if old is not None:
            self._closing.append(asyncio.create_task(old.close()))
            if old.fingerprint != pool.fingerprint:
                self._disk.forget_pages()

    async def ensure(self, digest: str) -> DiskAdapter:
        """The adapter on disk with its image, fetched and packed if need be. Concurrent callers
        share one fetch.

        Raises:
            AdapterNotFound: no manifest has this digest.
            DataLoss: bytes in the store do not match the digest.
            InvalidAdapter: not for this base, or over the rank limit.
            Unavailable: the object store cannot be reached.
        """
        if (adapter := self._disk.get(digest)) is not None and adapter.num_pages:
            return adapter
        if (error := self._backoff.blocked(digest, self._clock())) is not None:
            raise error
        if digest not in self._under_way:
            attempt = asyncio.create_task(self._prepared(digest))
            self._under_way[digest] = attempt
            attempt.add_done_callback(lambda done: self._fetched(digest, done))
        return await asyncio.shield(self._under_way[digest])

    async def close(self) -> None:
        """Stop fetching."""
        attempts = list(self._under_way.values())
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, *self._closing, return_exceptions=True)
        if self._pool is not None:
            await self._pool.close()
        await self._store.close()

    def _fetched(self, digest: str, attempt: asyncio.Task[DiskAdapter]) -> None:
        del self._under_way[digest]
        if not attempt.cancelled():
            attempt.exception()  # all callers may have gone, and none would read it

    async def _prepared(self, digest: str) -> DiskAdapter:
        """One attempt. After a failure, the next one has to wait for its back-off."""
        begin_s = self._clock()
        try:
            async with self._limiter.slot(digest):
                adapter = await self._on_disk(digest) or await self._fetch(digest)
        except Exception as failure:
            error = _typed(failure, digest)
            self._backoff.record(digest, error, self._clock())
            logger.warning("fetch failed", extra={"digest": digest, "reason": error.reason})
            raise error from failure
        self._backoff.clear(digest)
        elapsed_s = round(self._clock() - begin_s, 3)
        logger.info("prepared", extra={"digest": digest, "elapsed_s": elapsed_s})
        return adapter

    async def _on_disk(self, digest: str) -> DiskAdapter | None:
        """An adapter that an earlier run left, verified. A damaged one is set aside."""
        adapter = self._disk.get(digest)
        if adapter is None:
            return None
        assert self._pool is not None, "asked for an adapter before there was an engine"
        image = image_path(adapter.path, self._pool.fingerprint)
        if not image.exists() and not (adapter.path / TENSOR_FILE).exists():
            self._disk.drop(digest)
            return None
        try:
            num_pages = await self._prepare(adapter.path, adapter.sha256)
        except DataLoss as error:
            logger.warning("damaged", extra={"digest": digest, "reason": error.message})
            self._disk.drop_damaged(digest)
            return None
        return self._disk.prepared(digest, num_pages)

    async def _fetch(self, digest: str) -> DiskAdapter:
        raw = await self._manifest(digest)
        manifest = parse_manifest(raw)
        if [file.path for file in manifest.files] != [TENSOR_FILE]:
            raise DataLoss(f"the manifest of {digest} lists files this build does not know")
        self._disk.check_size(digest, manifest)
        folder = self._disk.begin(raw, manifest)
        try:
            [file] = manifest.files
            await self._file(file, folder)
            num_pages = await self._prepare(folder, file.sha256)
            return self._disk.commit(folder, digest, manifest, num_pages)
        except DataLoss:
            self._disk.quarantine(folder, digest)
            raise
        finally:
            self._disk.discard(folder)

    async def _prepare(self, folder: Path, sha256: str) -> int:
        """Pack for the current engine, which may have been replaced in the meantime. Tensors whose
        image is complete are deleted."""
        while True:
            pool = self._pool
            assert pool is not None, "asked for an adapter before there was an engine"
            try:
                num_pages = await pool.prepare(folder, sha256)
            except Unavailable:
                if pool is self._pool:
                    raise
            else:
                if pool is self._pool:
                    if num_pages:
                        (folder / TENSOR_FILE).unlink(missing_ok=True)
                    return num_pages

    async def _manifest(self, digest: str) -> bytes:
        check_digest(digest, field="adapters.digest")
        try:
            raw = await self._store.get_range(blob_key(digest), 0, MAX_MANIFEST_BYTES + 1)
        except ObjectMissing:
            raise AdapterNotFound(digest, "the object store has no such manifest") from None
        if digest_of(raw) != digest:
            raise DataLoss(f"the stored manifest of {digest} does not match its digest")
        return raw

    async def _file(self, file: File, folder: Path) -> None:
        """Stream one file into `folder`, unverified. Raises DataLoss if there is none."""
        with (folder / file.path).open("wb") as target:
            try:
                async for chunk in read_chunks(self._store, blob_key(file.sha256), 0, file.size):
                    if len(chunk) <= SMALL_BYTES:
                        target.write(chunk)
                    else:
                        await asyncio.to_thread(target.write, chunk)
            except ObjectMissing:
                raise DataLoss(f"the object store lost blob {file.sha256}") from None


def _typed(failure: Exception, digest: str) -> LoraplexError:
    if isinstance(failure, LoraplexError):
        return failure
    logger.error("fetch broke", exc_info=failure, extra={"digest": digest})
    why = f"adapter {digest} could not be fetched"
    if isinstance(failure, OSError) and failure.strerror:  # such as a full disk; without its path
        why = f"{why}: {failure.strerror}"
    return Unavailable(why, reason="FETCH_FAILED")
