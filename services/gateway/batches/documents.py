"""Reads and changes the gateway's documents in the object store, by compare-and-set."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from loraplex.errors import DataLoss
from loraplex_services.common.objects import (
    ObjectMissing,
    ObjectStore,
    PreconditionFailed,
    WriteUncertain,
)

_MAX_TRIES = 20
_READ_AT_ONCE = 100

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class FoundDocument(Generic[R]):
    """A document as it was read."""

    record: R
    etag: str
    """Changes with every write."""


def encoded(record: Any) -> bytes:
    """A document with a fresh `write_id`, so that no two writes have the same bytes."""
    fields = msgspec.to_builtins(record)
    return msgspec.json.encode({**fields, "write_id": secrets.token_hex(8)})


async def find(store: ObjectStore, key: str, cls: type[R]) -> FoundDocument[R] | None:
    """The document under `key`, or None."""
    try:
        stored = await store.get(key)
    except ObjectMissing:
        return None
    return FoundDocument(_decoded(cls, key, stored.data), stored.etag)


async def read_all(store: ObjectStore, keys: Sequence[str], cls: type[R]) -> AsyncGenerator[R]:
    """The documents under `keys`, leaving out those that are gone by now."""
    for start in range(0, len(keys), _READ_AT_ONCE):
        part = keys[start : start + _READ_AT_ONCE]
        for key, data in zip(part, await store.get_many(part), strict=True):
            if data is not None:
                yield _decoded(cls, key, data)


async def change(
    store: ObjectStore, key: str, cls: type[R], step: Callable[[R], R | None]
) -> R | None:
    """Replace a document by `step(current)`, again and again until no other writer got between.

    `step` returns None to leave things as they are, and may raise. It may run once more after it
    has had its effect, if the store cannot tell. Returns the document as it is now; None if there
    is none.
    """
    for attempt in range(_MAX_TRIES):
        found = await find(store, key, cls)
        if found is None:
            return None
        wanted = step(found.record)
        if wanted is None:
            return found.record
        try:
            await store.put_if_match(key, encoded(wanted), found.etag)
            return wanted
        except (PreconditionFailed, WriteUncertain):
            await asyncio.sleep(random.uniform(0, 0.01 * (attempt + 1)))
    raise PreconditionFailed(key)


def _decoded(cls: type[R], key: str, data: bytes) -> R:
    """Unknown fields are left out. Raises DataLoss naming the document that cannot be read."""
    try:
        return msgspec.json.decode(data, type=cls)
    except msgspec.MsgspecError as error:
        raise DataLoss(f"the document {key} is damaged: {error}") from None
