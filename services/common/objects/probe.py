"""Checks at start, by real operations, that a store can do what the registry needs.

Some S3 servers accept conditional headers and ignore them. Two publishers could then overwrite each
other unnoticed, so the registry does not start on such a store.
"""

from __future__ import annotations

import asyncio
import secrets

from loraplex.errors import LoraplexError
from loraplex_services.common.objects.store import (
    ChecksUploads,
    ObjectStore,
    PreconditionFailed,
    QuotesEtags,
    WriteUncertain,
)

_RACERS = 8


class UnsafeStore(LoraplexError):
    """The store lacks a guarantee that publishing relies on."""

    reason = "UNSAFE_OBJECT_STORE"


async def probe(store: ObjectStore) -> None:
    """Try every guarantee that publishing relies on, with objects under `probe/`.

    Tells the store what its server supports: the form of etags, and whether it checks uploads.

    Raises:
        UnsafeStore: naming the check that failed.
        ObjectStoreError: the store cannot be reached.
    """
    folder = f"probe/{secrets.token_hex(8)}"
    try:
        await _check_create_only(store, f"{folder}/create")
        await _check_compare_and_set(store, f"{folder}/swap")
        await _check_race(store, f"{folder}/race")
        await _check_range_and_list(store, folder)
        await _check_checksums(store, f"{folder}/damaged")
    finally:
        async for info in store.list_objects(f"{folder}/"):
            await store.delete(info.key)


async def _check_create_only(store: ObjectStore, key: str) -> None:
    await store.put_if_absent(key, b"first")
    try:
        await store.put_if_absent(key, b"second")
    except PreconditionFailed:
        if (await store.get(key)).data == b"first":
            return
    raise _unsafe(store, "create-only", "a second 'If-None-Match: *' write was accepted")


async def _check_compare_and_set(store: ObjectStore, key: str) -> None:
    stale = await store.put_if_absent(key, b"one")
    current = await _swap_finding_etag_form(store, key, b"two", stale)
    if (await store.get(key)).etag != current:
        raise _unsafe(store, "compare-and-set", "a read does not return the etag of the write")
    try:
        await store.put_if_match(key, b"three", stale)
    except PreconditionFailed:
        return
    raise _unsafe(store, "compare-and-set", "a write with a stale 'If-Match' was accepted")


async def _swap_finding_etag_form(store: ObjectStore, key: str, data: bytes, etag: str) -> str:
    try:
        return await store.put_if_match(key, data, etag)
    except PreconditionFailed:
        if not isinstance(store, QuotesEtags):
            raise _unsafe(store, "compare-and-set", "a correct etag was refused") from None
    store.quote_etags = not store.quote_etags
    try:
        return await store.put_if_match(key, data, etag)
    except PreconditionFailed:
        problem = "a correct 'If-Match' was refused, quoted and unquoted"
        raise _unsafe(store, "compare-and-set", problem) from None


async def _check_race(store: ObjectStore, key: str) -> None:
    async def create(racer: int) -> bool:
        try:
            await store.put_if_absent(key, b"racer %d" % racer)
            return True
        except (PreconditionFailed, WriteUncertain):
            return False

    winners = sum(await asyncio.gather(*(create(racer) for racer in range(_RACERS))))
    if winners != 1:
        raise _unsafe(store, "racing writers", f"{winners} of {_RACERS} creators of one key won")


async def _check_range_and_list(store: ObjectStore, folder: str) -> None:
    await store.put(f"{folder}/range", b"0123456789")
    if await store.get_range(f"{folder}/range", 3, 4) != b"3456":
        raise _unsafe(store, "range read", "another range of bytes came back")
    keys = [
        info.key async for info in store.list_objects(f"{folder}/", start_after=f"{folder}/race")
    ]
    if keys != [f"{folder}/range", f"{folder}/swap"]:
        raise _unsafe(store, "listing", f"just written objects are missing or unordered: {keys}")


async def _check_checksums(store: ObjectStore, key: str) -> None:
    if isinstance(store, ChecksUploads) and not await store.find_upload_check(key):
        problem = "a body that does not match its MD5 was accepted, and etags do not tell"
        raise _unsafe(store, "checksums", problem)


def _unsafe(store: ObjectStore, check: str, problem: str) -> UnsafeStore:
    return UnsafeStore(
        f"{store.url} is unsafe to publish to: check {check!r} failed: {problem}; "
        "use a server with S3 conditional writes, or file://"
    )
