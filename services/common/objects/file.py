"""Objects in a folder: `file:///path`. Safe for many processes on one machine or one shared mount.

    <root>/<key>     the objects
    <root>/.tmp/     bytes on their way; swept when older than a day
    <root>/.locks/   one file per key stripe, held with flock while a document is replaced

An object appears by `link` (create only) or `rename` (replace), so readers see all of it or none.
File and folder are synced before a write returns. Writes have threads of their own: a read, such as
that of a caller's key, does not wait while others have the disk write.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from loraplex_services.common.objects.durable import copy_range, into_folder, sync_folder, write_all
from loraplex_services.common.objects.file_errors import as_store_error, in_thread
from loraplex_services.common.objects.file_listing import KEY_PART, objects_below
from loraplex_services.common.objects.store import (
    BLOBS,
    After,
    BlobWriter,
    ObjectInfo,
    ObjectMissing,
    ObjectStoreError,
    PreconditionFailed,
    Segment,
    StoredObject,
)

logger = logging.getLogger(__name__)

_LOCK_STRIPES = 256
_LIST_BATCH = 1000
_SYNC_BYTES = 16 << 20
"""The disk starts on a blob while the rest of it arrives, instead of at its end."""
_TEMPORARY_MAX_AGE_S = 24 * 3600.0
_NUM_WRITERS = 4

T = TypeVar("T")


class FileStore:
    """An ObjectStore in a folder, which is created with its parents."""

    lists_etags = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self._temporary = root / ".tmp"
        self._locks = root / ".locks"
        self._clock = self._temporary / "clock"
        """Kept, because ext4 takes long to find an inode where many were just deleted."""
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, "object-writes")
        try:
            # Weights are private, and documents contain hashes of keys.
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if root.stat().st_mode & 0o004:
                fields = {"path": str(root)}
                logger.warning("all users of this machine may read the objects", extra=fields)
            for folder in (self._temporary, self._locks):
                folder.mkdir(exist_ok=True, mode=0o700)
            sync_folder(root)
            self._sweep_temporary()
        except OSError as error:
            # Workers only read: they may have the folder without write permission.
            if error.errno != errno.EROFS or not root.is_dir():
                raise ObjectStoreError(f"{root}: {error.strerror}") from error

    @property
    def url(self) -> str:
        return self._root.absolute().as_uri()

    async def get(self, key: str) -> StoredObject:
        data = await in_thread(self._read, key)
        return StoredObject(data, _etag(data))

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return await in_thread(lambda: [self._read_or_none(key) for key in keys])

    async def get_folder(self, prefix: str) -> list[tuple[str, bytes]]:
        return await in_thread(self._read_folder, prefix)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        return await in_thread(self._read_range, key, offset, length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await in_thread(self._head, key)

    async def put(self, key: str, data: bytes, *, after: After = None) -> None:
        def move(temporary: Path) -> None:
            with self._locked(key):
                self._replace(temporary, key)

        await self._put(self._temporary_file(data), move, after)

    async def put_if_absent(
        self, key: str, data: bytes, *, durable: bool = True, after: After = None
    ) -> str:
        await self._put(
            self._new_file(key, data, durable), partial(self._create, key, durable), after
        )
        return _etag(data)

    async def make_durable(self, key: str) -> bool:
        return await self._written(self._sync, key)

    async def put_if_match(
        self, key: str, data: bytes, etag: str, *, durable: bool = True, after: After = None
    ) -> str:
        move = partial(self._compare_and_set, key, etag, durable)
        await self._put(self._temporary_file(data), move, after)
        return _etag(data)

    async def _put(
        self,
        file: contextlib.AbstractContextManager[Path],
        move: Callable[[Path], None],
        after: After,
    ) -> None:
        """Write a temporary file, and move it to its key once `after` is done."""
        stack = contextlib.ExitStack()

        def write() -> Path:
            return stack.enter_context(file)

        def finish(temporary: Path) -> None:
            with stack:
                move(temporary)

        if after is None:
            return await self._written(lambda: finish(write()))
        temporary = await self._written(write)
        try:
            await asyncio.shield(after)
        except BaseException:
            self._writers.submit(stack.close)
            raise
        await self._written(finish, temporary)

    def writer(self) -> BlobWriter:
        return _FileWriter(self)

    async def compose(self, key: str, segments: Sequence[Segment]) -> None:
        await self._written(self._compose, key, segments)

    async def list_objects(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        walk = objects_below(self._root, prefix, start_after)
        is_over = False
        while not is_over:
            batch = await in_thread(lambda: list(islice(walk, _LIST_BATCH)))
            is_over = len(batch) < _LIST_BATCH  # most lists are short, and each thread costs time
            for info in batch:
                yield info

    async def delete(self, key: str, *, durable: bool = True) -> None:
        await self._written(self._delete_if_older, key, float("inf"), durable)

    async def delete_if_older(self, key: str, modified_s: float) -> bool:
        return await self._written(self._delete_if_older, key, modified_s)

    async def clock_s(self) -> float:
        def touch() -> float:
            self._clock.touch()
            return self._clock.stat().st_mtime

        return await in_thread(touch)

    async def close(self) -> None:
        self._writers.shutdown(wait=False)

    async def _written(self, work: Callable[..., T], *args: object) -> T:
        with as_store_error():
            return await asyncio.get_running_loop().run_in_executor(self._writers, work, *args)

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not all(KEY_PART.fullmatch(part) for part in parts):
            raise ObjectStoreError(f"illegal key {key!r}")
        return self._root.joinpath(*parts)

    def _read(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissing(key) from None

    def _read_or_none(self, key: str) -> bytes | None:
        try:
            return self._read(key)
        except ObjectMissing:
            return None

    def _read_folder(self, prefix: str) -> list[tuple[str, bytes]]:
        keys = [info.key for info in objects_below(self._root, prefix)]
        found = ((key, self._read_or_none(key)) for key in keys)
        return [(key, data) for key, data in found if data is not None]

    def _read_range(self, key: str, offset: int, length: int) -> bytes:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                return os.pread(file.fileno(), length, offset)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(key) from None

    def _head(self, key: str) -> ObjectInfo | None:
        try:
            stat = self._path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return ObjectInfo(key, stat.st_size, stat.st_mtime)

    @contextlib.contextmanager
    def _new_file(self, key: str, data: bytes, durable: bool) -> Iterator[Path]:
        """Raises PreconditionFailed if there is an object."""
        if self._path(key).exists():
            raise PreconditionFailed(key)
        # A document whose bytes are on the disk before its name is never read damaged.
        with self._temporary_file(data, durable or not key.startswith(BLOBS)) as temporary:
            yield temporary

    def _create(self, key: str, durable: bool, temporary: Path) -> None:
        path = self._path(key)
        try:
            into_folder(path, lambda: os.link(temporary, path), durable=durable)
        except FileExistsError:
            raise PreconditionFailed(key) from None

    def _sync(self, key: str) -> bool:
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                os.fsync(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return False
        sync_folder(path.parent)
        return True

    def _compare_and_set(self, key: str, etag: str, durable: bool, temporary: Path) -> None:
        with self._locked(key):
            current = self._read_or_none(key)
            if current is None or _etag(current) != etag:
                raise PreconditionFailed(key)
            self._replace(temporary, key, durable)

    def _compose(self, key: str, segments: Sequence[Segment]) -> None:
        with self._temporary_path() as temporary:
            if len(segments) == 1 and segments[0].whole:
                self._link_whole(segments[0].key, temporary)
            else:
                with open(temporary, "xb", buffering=0) as out:
                    for segment in segments:
                        self._append(segment, out.fileno())
                    os.fsync(out.fileno())
            with self._locked(key):
                self._replace(temporary, key)

    def _append(self, segment: Segment, out: int) -> None:
        try:
            copy_range(self._path(segment.key), segment.offset, segment.length, out)
        except FileNotFoundError:
            raise ObjectMissing(segment.key) from None

    def _link_whole(self, key: str, temporary: Path) -> None:
        try:
            os.link(self._path(key), temporary)
        except FileNotFoundError:
            raise ObjectMissing(key) from None
        os.utime(temporary)

    def _delete_if_older(self, key: str, modified_s: float, durable: bool = True) -> bool:
        path = self._path(key)
        with self._locked(key):
            try:
                if path.stat().st_mtime > modified_s:
                    return False
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return True
            if durable:
                sync_folder(path.parent)
        self._remove_empty_folders(path.parent)
        return True

    def _remove_empty_folders(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            while self._root not in (folder, folder.parent):  # the first level is soon used again
                folder.rmdir()
                folder = folder.parent

    @contextlib.contextmanager
    def _temporary_file(self, data: bytes, synced: bool = True) -> Iterator[Path]:
        """A new file in `.tmp` with these bytes."""
        with self._temporary_path() as path:
            with open(path, "xb", buffering=0) as file:
                write_all(file.fileno(), data)
                if synced:
                    os.fsync(file.fileno())
            yield path

    @contextlib.contextmanager
    def _temporary_path(self) -> Iterator[Path]:
        """A new path in `.tmp`, where nothing stays: on a full disk, work that fails would
        otherwise take the last bytes. Nor does a rename take a name away, by POSIX, if both names
        are of one inode."""
        path = self._temporary / secrets.token_hex(16)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _replace(self, temporary: Path, key: str, durable: bool = True) -> None:
        path = self._path(key)
        into_folder(path, lambda: os.replace(temporary, path), durable=durable)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        stripe = int.from_bytes(hashlib.sha256(key.encode()).digest()[:2], "big") % _LOCK_STRIPES
        with open(self._locks / f"{stripe:02x}", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _sweep_temporary(self) -> None:
        for entry in os.scandir(self._temporary):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime > _TEMPORARY_MAX_AGE_S:
                    os.unlink(entry.path)


class _FileWriter:
    """A file in the store's `.tmp` that moves to its key at the end."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._path = store._temporary / secrets.token_hex(16)
        with as_store_error():
            self._file = open(self._path, "xb", buffering=0)
        self._unsynced_bytes = 0
        self._syncing: asyncio.Future[None] | None = None

    async def write(self, *data: bytes) -> None:
        await self._store._written(self._append, data)
        self._unsynced_bytes += sum(map(len, data))
        if self._unsynced_bytes >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            await self._synced()
            self._unsynced_bytes = 0
            sync = self._store._written(os.fsync, self._file.fileno())
            self._syncing = asyncio.ensure_future(sync)

    def _append(self, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            write_all(self._file.fileno(), chunk)

    async def _synced(self) -> None:
        """Wait for the disk. Raises if the sync failed, which the next sync would not report
        again."""
        if self._syncing is not None:
            await asyncio.wait([self._syncing])
            self._syncing.result()

    async def commit(self, key: str) -> None:
        await self._synced()

        def finish() -> None:
            os.fsync(self._file.fileno())
            self._file.close()
            with self._store._locked(key):
                self._store._replace(self._path, key)

        await self._store._written(finish)

    async def abort(self) -> None:
        if self._syncing is not None:
            # Its descriptor may be another file's once this one is closed.
            await asyncio.wait([self._syncing])
        with as_store_error():
            self._file.close()
            self._path.unlink(missing_ok=True)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
