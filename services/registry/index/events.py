"""Reads the stream of the index's events."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import redis.asyncio

from loraplex_services.registry.index.redis_calls import PREFIX, text, translated

MAX_READ = 500
"""Most events in one read, and in one answer to a watcher."""
MAX_READ_BYTES = 4 << 20
"""JSON of events after which such a read or answer ends."""
_EVENTS_AT_ONCE = 50
"""Events in one answer of Redis, of at most 0.4 MB each."""


class StoredEvent(NamedTuple):
    """One event of the index."""

    number: int
    doc: dict[str, Any]
    """JSON {kind, doc}."""
    num_bytes: int
    """Size of this JSON."""


class Events:
    """Reads what `apply.lua` adds to the stream."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client

    async def read(
        self, epoch: str, after: int, count: int, block_ms: int | None = None
    ) -> list[StoredEvent]:
        """Events after a number, waiting up to `block_ms` for the first one. There may be more,
        even if these are fewer than `count`: they end after `MAX_READ_BYTES`.

        Raises: CatalogDown.
        """
        found: list[StoredEvent] = []
        num_bytes = 0
        while len(found) < count and num_bytes < MAX_READ_BYTES:
            wanted = min(_EVENTS_AT_ONCE, count - len(found))
            position: Any = {f"{PREFIX}{epoch}:events": f"{after}-0"}
            async with translated():
                answer: Any = await self._redis.xread(position, count=wanted, block=block_ms)
            some = [_event(id_, fields[b"e"]) for id_, fields in answer[0][1]] if answer else []
            found += some
            if len(some) < wanted:
                break
            num_bytes += sum(event.num_bytes for event in some)
            after, block_ms = some[-1].number, None
        return found


def _event(id_: bytes, doc: bytes) -> StoredEvent:
    return StoredEvent(int(text(id_).split("-")[0]), json.loads(doc), len(doc))
