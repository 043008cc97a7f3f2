"""Documents in the object store, which are JSON: read, created, and changed by compare-and-set."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from loraplex.errors import DataLoss
from loraplex_services.common.objects import (
    After,
    ObjectMissing,
    ObjectStore,
    PreconditionFailed,
    WriteUncertain,
)

logger = logging.getLogger(__name__)

_MAX_TRIES = 100
_READ_AT_ONCE = 100
_PROCESS = secrets.token_hex(8)
_WRITES = itertools.count()
"""Number the writes of this process, which asks for no random bytes at each."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StoredDocument(Generic[R]):
    """A document as it was read."""

    record: R
    etag: str
    """Changes with every write."""


@dataclass(frozen=True, slots=True)
class Seen(Generic[R]):
    """A document as it was a moment ago."""

    found: StoredDocument[R] | None = None
    """None = there was none."""


@runtime_checkable
class KeepsHistory(Protocol):
    """A record that holds its last changes."""

    def follows(self, earlier: Any) -> bool | None:
        """Whether this record was made from `earlier`, directly or not; None if that is unknown."""


def encode(record: Any) -> bytes:
    """A document with a fresh `write_id`, so that no two writes hold the same bytes.

    Raises:
        ValueError: a number is not finite. JSON has no such numbers, and null cannot be read back.
    """
    fields: dict[str, Any] = msgspec.to_builtins(record)
    _check_finite(fields)
    fields["write_id"] = f"{_PROCESS}-{next(_WRITES)}"
    return msgspec.json.encode(fields, order="sorted")


def _check_finite(value: Any) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} cannot be stored")
    elif isinstance(value, dict):
        for item in value.values():
            _check_finite(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_finite(item)


def decode(cls: type[R], data: bytes | str) -> R:
    """The inverse of `encode`. Unknown fields are left out, so newer writers can add some.

    Raises:
        ValueError: the text is not such a document.
    """
    as_key: Any = cls
    record: R = _decoder(as_key).decode(data)
    return record


@functools.cache
def _decoder(cls: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cls)


async def find(store: ObjectStore, key: str, cls: type[R]) -> StoredDocument[R] | None:
    """The document under `key`, or None. Raises DataLoss if it is damaged, as do all reads here
    unless they say otherwise."""
    try:
        stored = await store.get(key)
    except ObjectMissing:
        return None
    return StoredDocument(decoded(cls, key, stored.data), stored.etag)


async def look(store: ObjectStore, key: str, cls: type[R]) -> Seen[R]:
    """The document under `key`, for a `change` that is to follow."""
    return Seen(await find(store, key, cls))


async def read(store: ObjectStore, key: str, cls: type[R]) -> R | None:
    """The document under `key`, or None."""
    found = await find(store, key, cls)
    return None if found is None else found.record


async def read_all(store: ObjectStore, keys: list[str], cls: type[R]) -> list[R]:
    """The documents under `keys`, without those that have been deleted in the meantime."""
    found = zip(keys, await store.get_many(keys), strict=True)
    return [decoded(cls, key, data) for key, data in found if data is not None]


async def read_folder(store: ObjectStore, prefix: str, cls: type[R]) -> list[R]:
    """Every document under a prefix, ordered by key."""
    return [decoded(cls, key, data) for key, data in await store.get_folder(prefix)]


async def read_intact(store: ObjectStore, keys: Sequence[str], cls: type[R]) -> list[R]:
    """The documents under `keys` that can be read; the others are logged."""
    found = zip(keys, await store.get_many(list(keys)), strict=True)
    return intact(cls, [(key, data) for key, data in found if data is not None])


async def stream(store: ObjectStore, keys: Sequence[str], cls: type[R]) -> AsyncGenerator[R]:
    """The documents under `keys` that can be read, of which few are in memory at a time."""
    for start in range(0, len(keys), _READ_AT_ONCE):
        for record in await read_intact(store, keys[start : start + _READ_AT_ONCE], cls):
            yield record


def intact(cls: type[R], found: Iterable[tuple[str, bytes]]) -> list[R]:
    """The documents, given by key, that can be read. The others are logged, because one that is
    damaged must not hide all others."""
    records = []
    for key, data in found:
        try:
            records.append(decoded(cls, key, data))
        except DataLoss as error:
            logger.error("a damaged document was skipped", extra={"problem": error.message})
    return records


async def create(
    store: ObjectStore, key: str, record: object, *, durable: bool = True, after: After = None
) -> bool:
    """Create a document; returns False if there was one already. `durable` and `after` as in
    `ObjectStore`."""
    for attempt in range(_MAX_TRIES):
        _check(after)
        try:
            if await _written(store, key, record, None, durable=durable, after=after):
                return True
        except PreconditionFailed:
            _check(after)
            return False
        await _pause(attempt)
    raise PreconditionFailed(key)


async def change(
    store: ObjectStore,
    key: str,
    cls: type[R],
    step: Callable[[R | None], R | None],
    *,
    durable: bool = True,
    seen: Seen[R] | None = None,
    after: After = None,
) -> R | None:
    """Replace a document by `step(current)`, again and again until no other writer got between.

    `step` gets None if there is no document, returns None to leave things as they are, and may
    raise. Returns the document as it is now. `durable` and `after` as in `ObjectStore`.

    Args:
        seen: what is tried first, without reading the document again.
    """
    for attempt in range(_MAX_TRIES):
        _check(after)
        assumed, seen = seen, None
        found = assumed.found if assumed is not None else await find(store, key, cls)
        current = None if found is None else found.record
        wanted = step(current)
        if wanted is None and assumed is not None:
            continue
        if wanted is None:
            return current
        with contextlib.suppress(PreconditionFailed):
            if await _written(store, key, wanted, found, durable=durable, after=after):
                return wanted
        await _pause(attempt)
    raise PreconditionFailed(key)


async def _written(
    store: ObjectStore,
    key: str,
    wanted: object,
    found: StoredDocument[R] | None,
    *,
    durable: bool,
    after: After,
) -> bool:
    """Whether a document was created, or replaced by `wanted`; False if another writer came first.
    Raises PreconditionFailed if it is no longer as it was found, and WriteUncertain."""
    data = encode(wanted)
    try:
        if found is None:
            await store.put_if_absent(key, data, durable=durable, after=after)
        else:
            await store.put_if_match(key, data, found.etag, durable=durable, after=after)
        return True
    except WriteUncertain:
        if (was_written := await _was_written(store, key, wanted)) is None:
            raise
        return was_written


def decoded(cls: type[R], key: str, data: bytes) -> R:
    """Raises DataLoss naming the document that cannot be read."""
    try:
        return decode(cls, data)
    except ValueError as error:
        raise DataLoss(f"the document {key} is damaged: {error}") from None


async def _was_written(store: ObjectStore, key: str, wanted: object) -> bool | None:
    """Whether an uncertain write of `wanted` had an effect; None if that is unknown.

    Each change takes the next generation. Another document with the generation of `wanted` means
    that the write lost. A later generation may follow either; a record with a history tells.
    """
    try:
        found = decode(type(wanted), (await store.get(key)).data)
    except ObjectMissing:
        return False
    if _generation(found) <= _generation(wanted):
        return False
    return found.follows(wanted) if isinstance(found, KeepsHistory) else None


def _check(after: After) -> None:
    """Raises the failure of what writes wait for, which they raise as if it were their own."""
    if after is not None and after.done():
        after.result()


def _generation(record: object) -> int:
    return int(getattr(record, "generation", 0))


async def _pause(attempt: int) -> None:
    await asyncio.sleep(random.uniform(0, 0.002 * min(attempt, 20)))
