"""Watches: a snapshot, then every change in order; resumable; converging whatever Redis does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from loraplex.api.registry import TagTarget
from loraplex_services.registry.access.lookup import visible_batches
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api.convert import event_to_proto
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index import feed as feed_module
from loraplex_services.registry.index import watch as watch_module
from loraplex_services.registry.index.redis_calls import PREFIX
from loraplex_services.registry.index.watch import Batch, watch
from loraplex_services.registry.publish.tags import TagAddress
from loraplex_services.registry.records import PRIVATE, PUBLIC
from tests.registry.house import publish

PROD = TagAddress("default", "sql", "prod")


class Mirror:
    """What a watcher knows, kept by the rules of the wire."""

    def __init__(self, batches: AsyncIterator[Batch]) -> None:
        self._batches = batches
        self.token = ""
        self.known: dict[str, Any] = {}
        self.events: list[str] = []
        self.snapshots = 0

    async def step(self) -> Batch:
        """Take one message in."""
        batch = await asyncio.wait_for(anext(self._batches), 20)
        if batch.begins_snapshot:
            self.known.clear()
            self.snapshots += 1
        for event in batch.events:
            self._take(event["kind"], event["doc"])
        self.token = batch.token or self.token
        return batch

    async def until(self, key: str, value: object) -> None:
        """Take messages in until `key` has a value."""
        while self.known.get(key) != value:
            await self.step()

    async def snapshot(self) -> None:
        """Take messages in up to the end of a snapshot."""
        while not (await self.step()).ends_snapshot:
            pass

    def _take(self, kind: str, doc: dict[str, Any]) -> None:
        if kind == "tag":
            key = f"{doc['name']}:{doc['tag']}"
            self.known[key] = [target["version"] for target in doc["targets"]]
        elif kind == "version":
            key = f"{doc['name']}:v{doc['version']}"
            self.known[key] = "deleted" if doc["generation"] > 1 else doc["visibility"]
        else:
            key = doc["base_id"]
            self.known[key] = "base"
        self.events.append(f"{key} {doc['generation']}")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "BLOCK_MS", 50)


@pytest.mark.hostile
async def test_watches_that_begin_at_once_build_one_page_at_a_time(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_PAGE_SCOPES", 2)
    for number in range(5):
        await publish(registry, f"sql-{number}", 1)
    read_page, num_reading, most_reading = registry.catalog.page, 0, 0

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_reading, most_reading
        num_reading += 1
        most_reading = max(most_reading, num_reading)
        try:
            return await read_page(*args, **kwargs)
        finally:
            num_reading -= 1

    monkeypatch.setattr(registry.catalog, "page", counted)
    mirrors = [Mirror(watch(registry.catalog, "")) for _ in range(8)]
    await asyncio.gather(*(mirror.snapshot() for mirror in mirrors))
    assert most_reading == 1
    assert all(len(mirror.known) == 1 + 5 * 2 for mirror in mirrors)


@pytest.mark.hostile
async def test_a_page_of_a_snapshot_ends_with_the_version_that_fills_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters with many versions would keep the event loop for a long time together."""
    monkeypatch.setattr(watch_module, "_PAGE_VERSIONS", 3)
    for number, name in enumerate(["sql-1", "sql-1", "sql-2", "sql-2", "sql-3"]):
        await publish(registry, name, number)
    batches = []
    async for batch in watch(registry.catalog, ""):
        batches.append(
            [event["doc"]["version"] for event in batch.events if event["kind"] == "version"]
        )
        if batch.ends_snapshot:
            break
    assert [versions for versions in batches if versions] == [[1, 2, 1], [2, 1]]


async def test_a_watch_begins_with_everything_there_is(registry: Registry) -> None:
    await publish(registry, "sql", 1, "prod")
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    assert mirror.known == {"example/tiny": "base", "sql:v1": 1, "sql:latest": [1], "sql:prod": [1]}
    assert mirror.token


async def test_changes_arrive_in_order_and_none_is_left_out(registry: Registry) -> None:
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    mirror.events.clear()
    for seed in (1, 2):
        await publish(registry, "sql", seed)
    for version in (1, 2, 1):
        await registry.tags.set(PROD, [TagTarget(version, "")], None, "me")
    await registry.deletion.version("default", "sql", 2, "me", force=False, purge=False)
    await mirror.until("sql:v2", "deleted")
    assert mirror.events == [
        *("sql:v1 1", "sql:latest 1", "sql:v2 1", "sql:latest 2"),
        *("sql:prod 1", "sql:prod 2", "sql:prod 3"),
        *("sql:latest 3", "sql:v2 2"),
    ]
    assert mirror.known["sql:latest"] == [1]


async def test_an_update_is_announced_while_its_tag_still_moves(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers load it in the meantime."""
    await publish(registry, "sql", 1)
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    put, may_move = registry.store.put_if_match, asyncio.Event()

    async def late(*args: Any, **options: Any) -> str:
        await may_move.wait()
        return await put(*args, **options)

    monkeypatch.setattr(registry.store, "put_if_match", late)
    publishing = asyncio.create_task(publish(registry, "sql", 2))
    await mirror.until("sql:v2", PRIVATE)
    assert mirror.known["sql:latest"] == [1]
    assert not publishing.done()
    may_move.set()
    await mirror.until("sql:latest", [2])
    await publishing


async def test_a_token_resumes_after_exactly_what_was_handled(registry: Registry) -> None:
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    await publish(registry, "sql", 1)
    await mirror.until("sql:latest", [1])
    for version in (1, 1, 1):
        await registry.tags.set(PROD, [TagTarget(version, "", 1)], None, "me")
    await publish(registry, "sql", 2)
    resumed = Mirror(watch(registry.catalog, mirror.token))
    await resumed.until("sql:latest", [2])
    assert resumed.snapshots == 0
    assert resumed.events == ["sql:prod 1", "sql:v2 1", "sql:latest 2"]


async def test_moves_that_the_index_missed_are_reported_in_order(registry: Registry) -> None:
    await publish(registry, "sql", 1)
    await publish(registry, "sql", 2)
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    mirror.events.clear()
    for number in (1, 2):
        target = TagTarget(number, "sha256:x")
        await registry.tags.move(PROD, lambda _, t=target: [t], "dead", f"m{number}")
    await registry.tags.set(PROD, [TagTarget(1, "")], None, "me")
    await mirror.until("sql:prod", [1])
    while "sql:prod 3" not in mirror.events:
        await mirror.step()
    assert mirror.events == ["sql:prod 1", "sql:prod 2", "sql:prod 3"]


@pytest.mark.parametrize("token", ["nonsense", "0123456789abcdef:7", "EPOCH:999999"])
async def test_a_token_of_another_time_gives_a_snapshot(registry: Registry, token: str) -> None:
    await publish(registry, "sql", 1)
    epoch = await registry.catalog.epoch()
    mirror = Mirror(watch(registry.catalog, token.replace("EPOCH", epoch or "")))
    await mirror.until("sql:latest", [1])
    assert mirror.snapshots == 1


async def test_a_watch_goes_on_when_redis_is_flushed_and_the_index_comes_back(
    registry: Registry, metadata_url: str
) -> None:
    await publish(registry, "sql", 1)
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    raw = redis.asyncio.Redis.from_url(metadata_url)
    await raw.flushall()
    await raw.aclose()
    await registry.indexer.ensure()
    await publish(registry, "sql", 2)
    await mirror.until("sql:latest", [2])
    assert mirror.snapshots == 2


async def test_a_watcher_that_fell_too_far_behind_gets_a_snapshot(
    registry: Registry, metadata_url: str
) -> None:
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    for seed in (1, 2, 3):
        await publish(registry, "sql", seed)
    raw = redis.asyncio.Redis.from_url(metadata_url)
    await raw.xtrim(f"{PREFIX}{await registry.catalog.epoch()}:events", maxlen=1, approximate=False)
    await raw.aclose()
    resumed = Mirror(watch(registry.catalog, mirror.token))
    await resumed.until("sql:latest", [3])
    assert resumed.snapshots == 1


async def test_others_see_what_is_public_and_hear_when_it_no_longer_is(registry: Registry) -> None:
    stranger = Access("acme", "key", frozenset({"reader"}))
    await publish(registry, "sql", 1)
    await publish(registry, "open", 2, visibility=PUBLIC)
    mirror = Mirror(visible_batches(registry.catalog, stranger, ""))
    await mirror.snapshot()
    assert set(mirror.known) == {"example/tiny", "open:v1", "open:latest"}
    await publish(registry, "sql", 3)
    await publish(registry, "open", 4, visibility=1)
    await mirror.until("open:v1", "deleted")
    assert not any(key.startswith("sql") for key in mirror.known)


@pytest.mark.hostile
async def test_watch_shows_nothing_of_an_adapter_after_it_was_unshared(registry: Registry) -> None:
    """Later private versions arrived with digest, labels and file hashes, marked as deleted."""
    stranger = Access("acme", "key", frozenset({"reader"}))
    await publish(registry, "open", 1, visibility=PUBLIC)
    batches: list[Batch] = []

    async def recorded() -> AsyncIterator[Batch]:
        async for batch in visible_batches(registry.catalog, stranger, ""):
            batches.append(batch)
            yield batch

    mirror = Mirror(recorded())
    await mirror.snapshot()
    await publish(registry, "open", 2, visibility=PRIVATE)
    await mirror.until("open:v1", "deleted")
    await publish(registry, "open", 3, "secret-project")
    await publish(registry, "other", 4, visibility=PUBLIC)
    await mirror.until("other:v1", PUBLIC)
    assert set(mirror.known) == {"example/tiny", "open:v1", "open:latest", "other:v1"} | (
        {"other:latest"} & set(mirror.known)
    )
    for batch in batches:
        for event in batch.events:
            if event["kind"] == "version" and event["doc"]["generation"] > 1:
                shown = event_to_proto(event).version
                assert not (shown.files or shown.labels or shown.creator or shown.shared_with)


async def test_events_name_an_adapter_as_it_was_first_published(registry: Registry) -> None:
    stranger = Access("acme", "key", frozenset({"reader"}))
    await publish(registry, "sql", 1, "prod", visibility=PUBLIC, spelling="SQL")
    names: set[str] = set()

    async def recorded() -> AsyncIterator[Batch]:
        async for batch in visible_batches(registry.catalog, stranger, ""):
            events = [event_to_proto(event) for event in batch.events]
            names.update(e.tag.name or e.version.name for e in events if not e.HasField("base"))
            yield batch

    mirror = Mirror(recorded())
    await mirror.snapshot()
    await registry.tags.set(PROD, [], None, "tester")
    await mirror.until("sql:prod", [])
    await publish(registry, "sql", 2, visibility=PRIVATE)
    await mirror.until("sql:v1", "deleted")
    await mirror.until("sql:latest", [])
    assert names == {"SQL"}


@pytest.mark.hostile
async def test_watchers_that_wait_hold_no_connections_of_their_own(
    registry: Registry, metadata_url: str
) -> None:
    """Each watch blocked a connection; a hundred of them stopped all publishing."""
    mirrors = [Mirror(watch(registry.catalog, "")) for _ in range(150)]
    for mirror in mirrors:
        await mirror.snapshot()
    raw = redis.asyncio.Redis.from_url(metadata_url)
    await asyncio.gather(*[mirror.step() for mirror in mirrors])
    waiting = [asyncio.create_task(mirror.until("sql:latest", [1])) for mirror in mirrors]
    for _ in range(10):
        clients = await raw.client_list(_type="normal")
        assert sum("b" in client["flags"] for client in clients) <= 1
        await asyncio.sleep(0.01)
    await raw.aclose()
    await publish(registry, "sql", 1)
    await asyncio.gather(*waiting)
    assert {mirror.snapshots for mirror in mirrors} == {1}
    assert {tuple(mirror.events) for mirror in mirrors} == {tuple(mirrors[0].events)}


async def test_an_event_that_only_newer_registries_know_is_answered_with_a_snapshot(
    registry: Registry, metadata_url: str
) -> None:
    """During a rolling upgrade, both write to one index."""
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    epoch, number = await registry.catalog.position()
    prefix = f"{PREFIX}{epoch}:"
    async with redis.asyncio.Redis.from_url(metadata_url) as raw:
        await raw.set(f"{prefix}seq", number + 1)
        await raw.xadd(f"{prefix}events", {"e": '{"kind": "new", "doc": {}}'}, id=f"{number + 1}-0")
    await publish(registry, "sql", 1)
    await mirror.until("sql:latest", [1])
    assert mirror.snapshots == 2


async def test_an_event_that_only_newer_registries_know_during_a_snapshot_begins_another_one(
    registry: Registry, metadata_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(registry, "sql", 1)
    read_page, num_pages = registry.catalog.page, 0

    async def page_and_event(*args: Any, **options: Any) -> Any:
        nonlocal num_pages
        num_pages += 1
        if num_pages == 1:
            epoch, number = await registry.catalog.position()
            prefix, new = f"{PREFIX}{epoch}:", {"e": '{"kind": "new", "doc": {}}'}
            async with redis.asyncio.Redis.from_url(metadata_url) as raw:
                await raw.set(f"{prefix}seq", number + 1)
                await raw.xadd(f"{prefix}events", new, id=f"{number + 1}-0")
        return await read_page(*args, **options)

    monkeypatch.setattr(registry.catalog, "page", page_and_event)
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    assert mirror.snapshots == 2
    assert mirror.known["sql:latest"] == [1]


async def test_feed_reads_only_while_somebody_watches(registry: Registry) -> None:
    feed = registry.catalog.feed
    async with feed.joined(), feed.joined():
        task = feed._task
        assert task is not None and not task.done()
    assert feed._task is None
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_watcher_never_sees_an_index_that_went_back_in_time(
    registry: Registry, metadata_url: str
) -> None:
    """A Redis that restarts from an old dump: the watch waits for the rebuilt index."""
    raw = redis.asyncio.Redis.from_url(metadata_url)
    await publish(registry, "sql", 1)
    old = {key: await raw.dump(key) for key in await raw.keys("*")}
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    await publish(registry, "sql", 2)
    await mirror.until("sql:latest", [2])
    mirror.events.clear()
    await raw.flushall()
    for key, value in old.items():
        await raw.restore(key, 0, value)
    waiting = asyncio.create_task(mirror.snapshot())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await raw.aclose()
    await registry.indexer.ensure()
    await waiting
    assert mirror.known["sql:latest"] == [2]
    assert "sql:latest 1" not in mirror.events
