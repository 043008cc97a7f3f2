"""`python -m loraplex_services.registry.maintenance.backup FROM TO` copies a registry's objects.

FROM and TO are URLs such as LORAPLEX_OBJECTS: `s3://bucket/prefix` or `file:///folder`. Everything
may run meanwhile. TO is empty or an earlier backup, of which only what changed is written. A copy
from a backup is a restore, and its TO is an empty store.

What refers to something is copied before it: tags before versions, versions before blobs. Blobs
stay for days after a deletion, so every blob that a copied version names is there to be copied.
Documents are never deleted, and unfinished uploads and snapshots of the index need no copy.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field

from loraplex.errors import AlreadyExists, DataLoss, InvalidRequest, LoraplexError, codes_of
from loraplex.units import counted
from loraplex_services.common.objects import (
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    open_store,
    read_chunks,
)
from loraplex_services.common.telemetry.log import setup_logging
from loraplex_services.registry import layout

MARKER = "backup.json"
"""Only a copy has this object, from the first write on. Its field `complete` says that the copy can
be restored."""
PAGE = 500
NUM_COPIES = 8
"""Objects that are copied at the same time."""
_VERSIONS = "/versions/"
_REST = (layout.BASES, layout.TENANTS, layout.KEYS, layout.AUDIT, layout.USAGE)


@dataclass(slots=True)
class CopyResult:
    """The counts of a finished copy."""

    num_documents: int = 0
    """Documents that were read."""
    num_written: int = 0
    """Documents that the copy did not have, or had in an older state."""
    num_blobs: int = 0
    num_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    """Keys of blobs whose bytes do not match their name; they are not copied."""


async def copy_registry(source: ObjectStore, target: ObjectStore) -> CopyResult:
    """Copy documents and blobs.

    Raises:
        InvalidRequest: the source is not a registry's store, or is an unfinished copy of one.
        AlreadyExists: the target holds something that this command did not write.
    """
    if await source.head(layout.LAYOUT_KEY) is None:
        raise InvalidRequest.field("FROM", source.url, f"{source.url} holds no registry's objects")
    await layout.check_layout_number(source, layout.LAYOUT_KEY, layout.LAYOUT_NUMBER)
    is_restore = await _is_backup(source)
    await _begin(target)
    result = CopyResult()
    await _copy_documents(source, target, _all_but_versions(source), result)
    await _copy_documents(source, target, _versions(source), result)
    for shard in range(256):
        await _copy_blobs(source, target, f"{layout.BLOBS}{shard:02x}/", result)
    if result.damaged:
        return result
    if is_restore:
        await target.delete(MARKER)
    else:
        await target.put(MARKER, _marker(complete=True))
    return result


async def _is_backup(source: ObjectStore) -> bool:
    try:
        data = (await source.get(MARKER)).data
    except ObjectMissing:
        return False
    if data != _marker(complete=True):
        description = f"{source.url} is an unfinished or damaged copy; repeat the backup first"
        raise InvalidRequest.field("FROM", source.url, description)
    return True


async def _begin(target: ObjectStore) -> None:
    async for info in target.list_objects(""):
        if await target.head(MARKER) is None:
            raise AlreadyExists(
                f"TO: {target.url} holds {info.key}, which no backup has written; name an empty "
                "store or an earlier backup"
            )
        break
    await target.put(MARKER, _marker(complete=False))


def _marker(*, complete: bool) -> bytes:
    return json.dumps({"complete": complete}).encode()


async def _all_but_versions(source: ObjectStore) -> AsyncIterator[str]:
    yield layout.LAYOUT_KEY
    for prefix in (*_REST, layout.ADAPTERS):
        async for info in source.list_objects(prefix):
            if _VERSIONS not in info.key:
                yield info.key


async def _versions(source: ObjectStore) -> AsyncIterator[str]:
    async for info in source.list_objects(layout.ADAPTERS):
        if _VERSIONS in info.key:
            yield info.key


async def _copy_documents(
    source: ObjectStore, target: ObjectStore, keys: AsyncIterator[str], result: CopyResult
) -> None:
    async for page in _pages(keys):
        wanted, held = await source.get_many(page), await target.get_many(page)
        changed = [
            (key, data)
            for key, data, old in zip(page, wanted, held, strict=True)
            if data is not None and data != old
        ]
        await _each(target.put(key, data) for key, data in changed)
        result.num_documents += len(page)
        result.num_written += len(changed)


async def _pages(keys: AsyncIterator[str]) -> AsyncIterator[list[str]]:
    page: list[str] = []
    async for key in keys:
        page.append(key)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page


async def _copy_blobs(
    source: ObjectStore, target: ObjectStore, prefix: str, result: CopyResult
) -> None:
    held = {info.key: info.size async for info in target.list_objects(prefix)}
    missing = [
        info async for info in source.list_objects(prefix) if held.get(info.key) != info.size
    ]
    await _each(_copy_blob(source, target, info, result) for info in missing)


async def _copy_blob(
    source: ObjectStore, target: ObjectStore, info: ObjectInfo, result: CopyResult
) -> None:
    """Copy a blob, unless its bytes do not match its name or are deleted in the meantime."""
    writer, sha256 = target.writer(), hashlib.sha256()
    try:
        async for data in read_chunks(source, info.key, 0, info.size):
            sha256.update(data)
            await writer.write(data)
        if sha256.hexdigest() == info.key.rpartition("/")[2]:
            await writer.commit(info.key)
            result.num_blobs += 1
            result.num_bytes += info.size
        else:
            result.damaged.append(info.key)
    except ObjectMissing:
        pass
    finally:
        await writer.abort()


async def _each(works: Iterable[Awaitable[None]]) -> None:
    """Await all works, a few at the same time."""
    free = asyncio.Semaphore(NUM_COPIES)

    async def one(work: Awaitable[None]) -> None:
        async with free:
            await work

    await asyncio.gather(*map(one, works))


async def _run(source_url: str, target_url: str) -> None:
    source = open_store(source_url)
    try:
        target = open_store(target_url)
        try:
            result = await copy_registry(source, target)
        finally:
            await target.close()
    finally:
        await source.close()
    print(
        f"{counted(result.num_documents, 'document')} read, {result.num_written} written; "
        f"{counted(result.num_blobs, 'blob')} with {result.num_bytes} bytes written"
    )
    if result.damaged:
        keys = "\n  ".join(result.damaged)
        raise DataLoss(
            f"{counted(len(result.damaged), 'blob')} not copied, because the bytes do not match "
            f"the digest; upload the adapters again, then repeat the copy:\n  {keys}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loraplex_services.registry.maintenance.backup",
        description="Copy the objects of a registry into an empty store or an earlier backup. "
        "A copy from a backup into an empty store is a restore.",
    )
    parser.add_argument("source", metavar="FROM", help="s3://bucket/prefix or file:///folder")
    parser.add_argument("target", metavar="TO", help="the same")
    args = parser.parse_args(argv)
    setup_logging("registry")
    try:
        asyncio.run(_run(args.source, args.target))
    except LoraplexError as error:
        print(f"backup: {error.message}", file=sys.stderr)
        return codes_of(error).exit
    return 0


if __name__ == "__main__":
    sys.exit(main())
