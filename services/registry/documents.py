"""Reads and changes documents in the object store, by create-only and compare-and-set."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from loraplex.errors import DataLoss
from loraplex_services.common.objects import (
    ObjectMissing,
    ObjectStore,
    PreconditionFailed,
    StoredObject,
    WriteUncertain,
)
from loraplex_services.registry.records import MAX_TAG_MOVES, TagRecord, decode, encode

logger = logging.getLogger(__name__)

_MAX_TRIES = 100

R = TypeVar("R")


async def read(store: ObjectStore, key: str, cls: type[R]) -> R | None:
    """The document under `key`, or None."""
    try:
        return _decoded(cls, key, (await store.get(key)).data)
    except ObjectMissing:
        return None


async def read_all(store: ObjectStore, keys: list[str], cls: type[R]) -> list[R]:
    """The documents under `keys`, without those that have been deleted in the meantime."""
    found = zip(keys, await store.get_many(keys), strict=True)
    return [_decoded(cls, key, data) for key, data in found if data is not None]


async def read_folder(store: ObjectStore, prefix: str, cls: type[R]) -> list[R]:
    """Every document under a prefix, ordered by key."""
    return [_decoded(cls, key, data) for key, data in await store.get_folder(prefix)]


async def read_intact(store: ObjectStore, keys: Sequence[str], cls: type[R]) -> list[R]:
    """The documents under `keys` that can be read; the others are logged."""
    found = zip(keys, await store.get_many(list(keys)), strict=True)
    return intact(cls, [(key, data) for key, data in found if data is not None])


def intact(cls: type[R], found: Iterable[tuple[str, bytes]]) -> list[R]:
    """The documents, given by key, that can be read. The others are logged, because one that is
    damaged must not hide all others."""
    records = []
    for key, data in found:
        try:
            records.append(_decoded(cls, key, data))
        except DataLoss as error:
            logger.error("a damaged document was skipped", extra={"problem": error.message})
    return records


async def create(store: ObjectStore, key: str, record: object, *, durable: bool = True) -> bool:
    """Create a document; returns False if there was one already. `durable` as in `ObjectStore`."""
    for attempt in range(_MAX_TRIES):
        try:
            await store.put_if_absent(key, encode(record), durable=durable)
            return True
        except PreconditionFailed:
            return False
        except WriteUncertain:
            written = await _was_written(store, key, record)
            if written is None:
                raise
            if written:
                return True
            await _pause(attempt)
    raise PreconditionFailed(key)


async def change(
    store: ObjectStore,
    key: str,
    cls: type[R],
    step: Callable[[R | None], R | None],
    *,
    durable: bool = True,
    is_new: bool = False,
) -> R | None:
    """Replace a document by `step(current)`, again and again until no other writer got between.

    `step` gets None if there is no document, returns None to leave things as they are, and may
    raise. Returns the document as it is now. `durable` as in `ObjectStore`.

    Args:
        is_new: there is probably no document, so that it is created without looking for one first.
    """
    for attempt in range(_MAX_TRIES):
        is_assumed = is_new and not attempt
        stored = None if is_assumed else await _stored(store, key)
        current = None if stored is None else _decoded(cls, key, stored.data)
        wanted = step(current)
        if wanted is None and is_assumed:
            continue
        if wanted is None:
            return current
        try:
            if stored is None:
                await store.put_if_absent(key, encode(wanted), durable=durable)
            else:
                await store.put_if_match(key, encode(wanted), stored.etag, durable=durable)
            return wanted
        except PreconditionFailed:
            await _pause(attempt)
        except WriteUncertain:
            written = await _was_written(store, key, wanted)
            if written is None:
                raise
            if written:
                return wanted
            await _pause(attempt)
    raise PreconditionFailed(key)


async def _stored(store: ObjectStore, key: str) -> StoredObject | None:
    try:
        return await store.get(key)
    except ObjectMissing:
        return None


def _decoded(cls: type[R], key: str, data: bytes) -> R:
    """Raises DataLoss naming the document that cannot be read."""
    try:
        return decode(cls, data)
    except ValueError as error:
        raise DataLoss(f"the document {key} is damaged: {error}") from None


async def _was_written(store: ObjectStore, key: str, wanted: object) -> bool | None:
    """Whether an uncertain write of `wanted` had an effect; None if that is unknown.

    Each change takes the next generation. Another document with the generation of `wanted` means
    that the write lost. A later generation may follow either; a tag decides it by its last moves.
    """
    try:
        found = decode(type(wanted), (await store.get(key)).data)
    except ObjectMissing:
        return False
    if _generation(found) <= _generation(wanted):
        return False
    if isinstance(wanted, TagRecord) and isinstance(found, TagRecord):
        return _was_moved(found, wanted)
    return None


def _was_moved(found: TagRecord, wanted: TagRecord) -> bool | None:
    """Whether the move that `wanted` ends with is among those before `found`."""
    if not wanted.moves or wanted.moves[-1].generation != wanted.generation:
        return None
    if wanted.moves[-1] in found.moves:
        return True
    oldest = found.moves[0].generation if len(found.moves) == MAX_TAG_MOVES else 0
    return False if oldest <= wanted.generation else None


def _generation(record: object) -> int:
    return int(getattr(record, "generation", 0))


async def _pause(attempt: int) -> None:
    await asyncio.sleep(random.uniform(0, 0.002 * min(attempt, 20)))
