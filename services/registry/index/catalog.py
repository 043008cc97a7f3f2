"""The index in Redis: its contents, its keys, and the scripts that change it.

Every document here is a copy of an object, and the index is rebuilt from the objects when it is
empty or behind. All keys, without their prefix `loraplex:`:

    epoch                    id of the current index; absent = no index
    rebuild                  lease of a rebuild, its value the epoch being built
    turn:<work>              claimed for an interval by the process that does periodic work
    snapshot                 "<epoch> <number of its last event>" when the objects were last copied
    dirty                    SET of scopes that changed while a rebuild was reading
    pending                  HASH operation id -> "<unix ms> <scope>", noted before objects change
    <epoch>:seq              number of the last event
    <epoch>:events           STREAM of events, ids `<seq>-0`, field e = JSON {kind, doc}
    <epoch>:event_bytes      size of these events
    <epoch>:names            ZSET of scopes with a live version, ordered by name
    <epoch>:shared           ZSET of those of them that other tenants may see
    <epoch>:a:<scope>        HASH v<number> -> version, d:<digest> -> number, m:<digest>, newest and
                             p<number> (see apply.lua), adapter, count and highest of all numbers,
                             live (how many are not deleted), lasting if one is or was not ephemeral
    <epoch>:t:<scope>        HASH tag -> tag
                             (both end some time after the last of ephemeral versions only)
    <epoch>:staged           ZSET of "<tag> <scope>" by the time that its staged move ends
    <epoch>:expiring         ZSET of "<number> <scope>" of ephemeral versions by their end
    <epoch>:bases            HASH base id -> base without its modules
    <epoch>:use:<tenant>     HASH bytes, versions: what quotas count
    <epoch>:blobs:<tenant>   HASH sha256 -> number of live versions that have this file

A scope is `<tenant>/<name>`, or `bases`. Documents are stored as "<generation> <JSON>".
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib import resources
from typing import Any, TypeVar

import redis.asyncio

from loraplex_services.registry.index.events import Events
from loraplex_services.registry.index.feed import EventFeed
from loraplex_services.registry.index.found import (
    Cursor,
    Found,
    IndexPage,
    found_of,
    page_of,
    record_of,
)
from loraplex_services.registry.index.gathering import RequestBatcher
from loraplex_services.registry.index.items import IndexChange, Item, arguments_of
from loraplex_services.registry.index.open_uploads import OpenUploads
from loraplex_services.registry.index.recent_uses import RecentUses
from loraplex_services.registry.index.redis_calls import (
    PREFIX,
    CatalogDown,
    NoIndex,
    text,
    translated,
    wait,
)
from loraplex_services.registry.index.usage_counters import UsageCounters
from loraplex_services.registry.records import BaseRecord, VersionRecord

MAX_EVENTS = 100_000
"""Events kept for watchers that resume; those further behind get a snapshot."""
MAX_EVENT_BYTES = 256 << 20
"""Most bytes of these events. One has 1 to 2 kB, but versions may have much longer labels."""
_REBUILD_LEASE_MS = 30_000
_MAX_TRIES = 5
_DROP_KEYS = 1000
_MAX_REPLACED = 8
"""Number of past epochs that are remembered."""
MAX_VERSIONS_AT_ONCE = 500
"""Versions of an adapter after which one answer of Redis ends."""
_BEGIN = Cursor()
_NOWHERE = "0"
_READS_VERSIONS = ("page", "resolve")
"""Scripts that need `versions_above.lua`."""
_SCRIPTS = "apply read resolve page switch release note before_new".split()
_MAX_AT_ONCE = 64
"""Most references resolved or scopes changed in one round trip: Redis does nothing else in it."""

T = TypeVar("T")


class Catalog:
    """The index. Every method raises CatalogDown if Redis or the index is unavailable."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.make_index: Callable[[], Awaitable[None]] | None = None
        """Builds the index for writers that find none; None until there is a part that can."""
        self._redis = client
        self._seen: tuple[str, int] = ("", 0)
        """The newest position that was read. A Redis that restarts from an old dump, or a replica
        that was behind when it took over, has the same epoch and a smaller number, or an epoch
        that was replaced."""
        self._replaced: deque[str] = deque(maxlen=_MAX_REPLACED)
        self.events = Events(client)
        self.feed = EventFeed(self.position, self.events.read)
        """The newest events, for watchers."""
        self.snapshot_lock = asyncio.Lock()
        """Held while one page of a watcher's snapshot is built. When many watches begin at once,
        other calls are answered between two pages."""
        self.usage_counters = UsageCounters(client)
        self.open_uploads = OpenUploads(client)
        self.recent_uses = RecentUses(client)
        self._lookups = RequestBatcher(self._find_all, _MAX_AT_ONCE)
        self._notes = RequestBatcher(self._note_all, _MAX_AT_ONCE)
        self._changes = RequestBatcher(self._apply_all, _MAX_AT_ONCE)
        folder = resources.files("loraplex_services.registry.index")
        source = {name: folder.joinpath(f"{name}.lua").read_text() for name in _SCRIPTS}
        for name in _READS_VERSIONS:
            source[name] = folder.joinpath("versions_above.lua").read_text() + source[name]
        self._scripts = {name: client.register_script(lua) for name, lua in source.items()}

    async def epoch(self) -> str | None:
        """The current index, or None if there is none."""
        async with translated():
            value = await self._redis.get(f"{PREFIX}epoch")
            return None if value is None else text(value)

    async def note_pending(self, scope: str) -> str:
        """Note that objects of `scope` are about to change; returns the operation's id."""
        return await self._notes.ask(scope)

    async def _note_all(self, scopes: Sequence[str]) -> list[str]:
        """Several `note_pending` in one round trip."""
        operations = [secrets.token_hex(8) for _ in scopes]
        pairs = [text for pair in zip(operations, scopes, strict=True) for text in pair]
        async with translated():
            await self._scripts["note"](keys=[PREFIX], args=pairs)
        return operations

    async def pending(self) -> list[tuple[str, str, float]]:
        """(operation id, scope, age in seconds) of changes that were noted and not yet applied."""
        async with translated():
            now = await self._redis.time()
            noted = await wait(self._redis.hgetall(f"{PREFIX}pending"))
        now_s = int(now[0]) + int(now[1]) / 1e6
        split = [(text(op), *text(value).split(" ", 1)) for op, value in noted.items()]
        return [(op, scope, now_s - int(noted_ms) / 1000) for op, noted_ms, scope in split]

    async def forget_pending(self, operations: Iterable[str]) -> None:
        """Remove notes whose scopes were read again."""
        if ids := list(operations):
            async with translated():
                await wait(self._redis.hdel(f"{PREFIX}pending", *ids))

    async def apply(self, scope: str, items: Sequence[Item], *, operation: str = "") -> None:
        """Write documents and their events atomically; older generations change nothing.

        `operation` is the pending note to remove in the same transaction.
        """
        await self._patiently(lambda: self._changes.ask(IndexChange(scope, items, operation)))

    async def _apply_all(self, changes: Sequence[IndexChange]) -> list[None]:
        """Several `apply` in one round trip, all or nothing."""
        limits = MAX_EVENTS, MAX_EVENT_BYTES
        await self._run("apply", [*limits, "", *arguments_of(changes, with_events=True)])
        return [None] * len(changes)

    async def apply_many(self, into_epoch: str, changes: Sequence[IndexChange]) -> None:
        """Write documents into an index under construction, which has no watchers yet."""
        for at in range(0, len(changes), _MAX_AT_ONCE):
            some = arguments_of(changes[at : at + _MAX_AT_ONCE], with_events=False)
            async with translated():
                await self._scripts["apply"](keys=[PREFIX], args=["", 0, 0, 0, into_epoch, *some])

    async def find(self, scope: str, kind: str, selector: str = "") -> Found:
        """The versions that a tag, number (in decimal) or digest selects, and the tags. The kind
        `live` selects versions that are not deleted, `all` every version, `newest` some live ones
        and some tags (its selector says how many), and `adapter` neither versions nor tags."""
        if kind not in ("live", "all"):
            found, more = await self._lookups.ask((scope, kind, selector))
            return dataclasses.replace(found, has_more=more != _NOWHERE)
        found, after = await self._lookups.ask((scope, kind, _NOWHERE))
        versions = [*found.versions]
        while after != _NOWHERE:  # Redis does nothing else while it reads; there may be 10,000.
            found, after = await self._lookups.ask((scope, kind, after))
            versions += found.versions
        versions.sort(key=lambda version: version.version)
        return dataclasses.replace(found, versions=tuple(versions))

    async def before_new(
        self, scope: str, digest: str
    ) -> tuple[int, int, list[VersionRecord]] | None:
        """(highest number, how many are not deleted, the first version if there is one) of an
        adapter. None = a version had this digest, or a number is missing: the objects decide."""
        found = await self._run("before_new", [scope, digest])
        if found is None:
            return None
        return int(found[0]), int(found[1]), [record_of(VersionRecord, v) for v in found[2:] if v]

    async def num_live(self, scope: str) -> int:
        """How many versions of an adapter are not deleted."""
        question = ["HGET", f"a:{scope}", "live"]
        return int(await self._patiently(lambda: self._run("read", question)) or 0)

    async def num_tags(self, scope: str) -> int:
        """How many tags an adapter has, deleted ones included."""
        return int(await self._patiently(lambda: self._run("read", ["HLEN", f"t:{scope}"])))

    async def _find_all(self, wanted: Sequence[tuple[str, str, str]]) -> list[tuple[Found, str]]:
        """Several `find` in one round trip, with what their next parts begin after."""
        words = [word for triple in wanted for word in triple]
        answers = await self._run("resolve", [MAX_VERSIONS_AT_ONCE, *words])
        return [(found_of(tags, versions, adapter), text(more))
                for tags, versions, adapter, more in answers]  # fmt: skip

    async def page(
        self,
        index: str,
        low: str,
        high: str,
        limit: int,
        *,
        which: str,
        max_versions: int = MAX_VERSIONS_AT_ONCE,
        after: Cursor = _BEGIN,
    ) -> IndexPage:
        """Scopes of the set `names` or `shared` between two ZRANGEBYLEX bounds, with documents.

        Args:
            limit: most scopes.
            which: `current` for one version of each scope, `versions` for those that are not
                deleted, `everything` for these, too, but with the tags of a scope only where its
                versions end.
            max_versions: a page ends after as many of them, even within a scope.
        """
        low = max(after.bound, low, key=lambda bound: bound[1:]) if after.scope else low
        question = [index, low, high, limit, which, max_versions, after.scope, after.version]
        epoch, _, answer = await self._at_position("page", question)
        return page_of(epoch, answer[0], bool(answer[1]))

    async def bases(self) -> list[BaseRecord]:
        """All bases without their modules, ordered by id."""
        values = await self._run("read", ["HVALS", "bases"])
        return sorted((record_of(BaseRecord, v) for v in values), key=lambda base: base.base_id)

    async def usage(self, tenant: str) -> tuple[int, int]:
        """(bytes, versions) that a tenant has live."""
        question = ["HMGET", f"use:{tenant}", "bytes", "versions"]
        values = await self._patiently(lambda: self._run("read", question))
        return int(values[0] or 0), int(values[1] or 0)

    async def known_blobs(self, tenant: str, sha256s: Sequence[str]) -> list[str]:
        """The files that a live version of this tenant refers to already."""
        if not sha256s:
            return []
        question = ["HMGET", f"blobs:{tenant}", *sha256s]
        values = await self._patiently(lambda: self._run("read", question))
        return [sha256 for sha256, value in zip(sha256s, values, strict=True) if value is not None]

    async def staged_until(self, time_s: float) -> list[tuple[str, str]]:
        """(scope, tag) of staged moves that expired at this unix time or before."""
        values = await self._run("read", ["ZRANGEBYSCORE", "staged", "-inf", time_s])
        return [(scope, tag) for tag, _, scope in (text(v).partition(" ") for v in values)]

    async def expired(self, time_s: float) -> list[tuple[str, int]]:
        """(scope, number) of ephemeral versions that ended at this unix time or before."""
        values = await self._run("read", ["ZRANGEBYSCORE", "expiring", "-inf", time_s])
        split = (text(value).partition(" ") for value in values)
        return [(scope, int(number)) for number, _, scope in split]

    async def ephemeral_versions(self, tenant: str) -> list[VersionRecord]:
        """The ephemeral versions of a tenant that are not deleted."""
        members: set[str] = set()
        cursor: Any = 0
        while True:
            question = ["ZSCAN", "expiring", cursor, "MATCH", f"* {tenant}/*", "COUNT", 1000]
            cursor, pairs = await self._run("read", question)
            members.update(text(member) for member in pairs[::2])
            if not int(cursor):
                break
        wanted = (member.partition(" ") for member in members)
        found = await asyncio.gather(*(self.find(s, "version", n) for n, _, s in wanted))
        return [version for one in found for version in one.versions if not version.deleted]

    async def position(self) -> tuple[str, int]:
        """(epoch, number of its last event) of the current index."""
        epoch, sequence, _ = await self._at_position("read", ["EXISTS", "seq"])
        return epoch, sequence

    async def begin_rebuild(self) -> str | None:
        """Take the rebuild lease; returns the new epoch, or None if another process rebuilds."""
        epoch = secrets.token_hex(8)
        async with translated():
            taken = await self._redis.set(f"{PREFIX}rebuild", epoch, nx=True, px=_REBUILD_LEASE_MS)
            if taken:
                await self._redis.delete(f"{PREFIX}dirty")
        return epoch if taken else None

    async def extend_rebuild(self) -> None:
        """Extend the lease while documents are read. `switch` notices a lost lease."""
        async with translated():
            await self._redis.pexpire(f"{PREFIX}rebuild", _REBUILD_LEASE_MS)

    async def switch(self, epoch: str) -> list[str] | bool:
        """Make a rebuilt index the current one.

        Returns True when done, False when the lease was lost, or the scopes to read once more.
        """
        async with translated():
            answer = await self._scripts["switch"](keys=[PREFIX], args=[epoch])
        if isinstance(answer, list):
            return [text(scope) for scope in answer]
        return text(answer) == "switched"

    async def drop(self, epoch: str) -> None:
        """Remove an index that is no longer, or never became, the current one."""
        async with translated():
            batch: list[bytes] = []
            async for key in self._redis.scan_iter(match=f"{PREFIX}{epoch}:*", count=1000):
                batch.append(key)
                if len(batch) >= _DROP_KEYS:
                    await self._redis.unlink(*batch)
                    batch = []
            if batch:
                await self._redis.unlink(*batch)

    async def release_rebuild(self, epoch: str) -> None:
        """Release the lease after a failure."""
        async with translated():
            await self._scripts["release"](keys=[PREFIX], args=[epoch])

    async def memory_bytes(self) -> tuple[int, int]:
        """How much the metadata server uses, and its maxmemory; 0 = no limit.

        Raises CatalogDown if it may evict keys: an incomplete index would look complete.
        """
        async with translated():
            info = await self._redis.info("memory")
        limit, policy = info.get("maxmemory", 0), info.get("maxmemory_policy", "")
        if limit and policy.startswith("allkeys"):
            raise CatalogDown(
                f"metadata server: its maxmemory-policy {policy} may evict parts of the index; set "
                "noeviction, then run registry reindex"
            )
        return info["used_memory"], limit

    async def claim_interval(self, work: str, interval_s: float) -> bool:
        """Claim some periodic `work` for this interval; True for one process of all."""
        interval_ms = max(1, int(interval_s * 1000))
        async with translated():
            return bool(await self._redis.set(f"{PREFIX}turn:{work}", 1, nx=True, px=interval_ms))

    async def changes_since_snapshot(self) -> int | None:
        """Events since `note_snapshot`; None if there was none for this index."""
        epoch, sequence = await self.position()
        async with translated():
            noted = await self._redis.get(f"{PREFIX}snapshot")
        then_epoch, _, then = text(noted or b" 0").partition(" ")
        return sequence - int(then) if then_epoch == epoch else None

    async def note_snapshot(self, epoch: str, sequence: int) -> None:
        """Record that a snapshot covers the objects up to this position."""
        async with translated():
            await self._redis.set(f"{PREFIX}snapshot", f"{epoch} {sequence}")

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`, building the index first if there is none: writers wait for it, readers do
        not."""
        for _ in range(_MAX_TRIES):
            try:
                return await work()
            except NoIndex:
                if self.make_index is None:
                    raise
                await self.make_index()
        return await work()

    async def _run(self, script: str, arguments: list[Any]) -> Any:
        return (await self._at_position(script, arguments))[2]

    async def _at_position(self, script: str, arguments: list[Any]) -> tuple[str, int, Any]:
        """(epoch, number of its last event, answer) of a script on the current index.

        Raises: NoIndex, also if the index is older than what was read before.
        """
        async with translated():
            answer = await self._scripts[script](keys=[PREFIX], args=[*self._seen, *arguments])
        epoch, sequence = (text(answer[0]), int(answer[1])) if answer is not None else ("", 0)
        if not epoch or epoch in self._replaced:
            raise NoIndex("the index is being rebuilt", retry_after_s=1.0)
        seen_epoch, seen_sequence = self._seen
        if epoch != seen_epoch:
            self._replaced.append(seen_epoch)
            self._seen = (epoch, sequence)
        elif sequence > seen_sequence:  # Answers may overtake each other.
            self._seen = (epoch, sequence)
        return epoch, sequence, answer[2]
