"""The index is only a copy: flushed, behind or gone, answers stay right and it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio

from loraplex.api.registry import TagTarget
from loraplex.errors import AdapterNotFound, InvalidRequest
from loraplex.refs import parse_ref
from loraplex_services.common import documents
from loraplex_services.common.objects import open_store
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry import layout
from loraplex_services.registry.access.lookup import Query
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.access.sharing import SharingChange
from loraplex_services.registry.assembly import Registry, assemble
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.found import Cursor
from loraplex_services.registry.index.items import IndexChange
from loraplex_services.registry.index.metadata_server import MetadataServer
from loraplex_services.registry.index.redis_calls import PREFIX, CatalogDown
from loraplex_services.registry.publish.tags import TagAddress
from loraplex_services.registry.records import PUBLIC, TenantRecord
from tests.registry.house import publish, tiny_base

ROOT = Access("default", "", frozenset({"root", "admin"}))
NOWHERE = "unix:///nonexistent/metadata.sock"


@pytest.fixture
async def raw(metadata_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = redis.asyncio.Redis.from_url(metadata_url)
    yield client
    await client.aclose()


async def _version_of(registry: Registry, ref: str) -> int:
    return (await registry.lookup.resolve(parse_ref(ref), ROOT)).version.version


async def _snapshot(registry: Registry) -> object:
    """Everything that readers can see of the default tenant."""
    page, cursor = await registry.lookup.page(Query(all_versions=True), ROOT, 1000, Cursor())
    assert cursor is None
    return [
        (e.version, e.adapter, [(t.tag, t.targets, t.generation) for t in e.tags]) for e in page
    ]


async def _fill(registry: Registry) -> None:
    await publish(registry, "sql", 1, "prod")
    await publish(registry, "sql", 2, visibility=3)
    await publish(registry, "acme/chat", 3)
    await publish(registry, "gone", 4)
    await registry.tags.set(
        TagAddress("default", "sql", "canary"), [TagTarget(1, ""), TagTarget(2, "")], None, ""
    )
    await registry.deletion.adapter("default", "gone", "", purge=False)
    await registry.deletion.version("default", "sql", 1, "", force=True, purge=False)


async def test_a_rebuilt_index_equals_the_one_that_grew(
    registry: Registry, raw: redis.asyncio.Redis
) -> None:
    await _fill(registry)
    before = await _snapshot(registry)
    usage = await registry.catalog.usage("default")
    old_epoch = await registry.catalog.epoch()
    epoch, versions, tags, bases = await registry.indexer.rebuild()
    assert epoch != old_epoch and (versions, tags, bases) == (2, 2, 1)
    assert await _snapshot(registry) == before
    assert await registry.catalog.usage("default") == usage
    assert [base.base_id for base in await registry.catalog.bases()] == ["example/tiny"]
    assert [key async for key in raw.scan_iter(f"{PREFIX}{old_epoch}:*")] == []


async def test_readers_are_served_from_the_objects_while_redis_is_away(
    registry: Registry, objects_url: str
) -> None:
    await _fill(registry)
    alone = assemble(open_store(objects_url), Catalog(connect_redis(NOWHERE)))
    assert await _snapshot(alone) == await _snapshot(registry)
    assert await _version_of(alone, "sql:v2") == 2
    digest = (await registry.lookup.resolve(parse_ref("sql"), ROOT)).version.digest
    assert await _version_of(alone, f"sql@{digest}") == 2
    with pytest.raises(AdapterNotFound):
        await _version_of(alone, "gone")


async def test_lists_page_alike_with_and_without_redis(
    registry: Registry, objects_url: str
) -> None:
    for name in ("a", "a-b", "a.b", "ab", "acme/x"):
        await publish(registry, name, 1)
    alone = assemble(open_store(objects_url), Catalog(connect_redis(NOWHERE)))
    pages = []
    for house in (registry, alone):
        names, cursor = [], Cursor()
        while cursor is not None:
            page, cursor = await house.lookup.page(Query(), ROOT, 2, cursor)
            names += [f"{e.version.tenant}/{e.version.name}" for e in page]
        pages.append(names)
    assert pages[0] == ["acme/x", "default/a", "default/a-b", "default/a.b", "default/ab"]
    assert pages[1] == pages[0]


async def test_nothing_is_published_while_redis_is_away(
    registry: Registry, objects_url: str
) -> None:
    alone = assemble(open_store(objects_url), Catalog(connect_redis(NOWHERE)))
    with pytest.raises(CatalogDown):
        await publish(alone, "sql", 1)
    with pytest.raises(AdapterNotFound):
        await _version_of(registry, "sql")


async def test_checks_of_an_index_log_once_that_redis_is_away(
    objects_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    indexer = assemble(open_store(objects_url), Catalog(connect_redis(NOWHERE))).indexer
    keeping = asyncio.create_task(indexer.keep(0.0))
    checks = set()
    while len(checks) < 4:
        await asyncio.sleep(0.01)
        checks.add(indexer._checked_s)
    keeping.cancel()
    assert indexer.state()["problem"]
    assert caplog.messages.count("index unavailable") == 1


async def test_a_flushed_redis_changes_no_answer_and_is_filled_again(
    registry: Registry, raw: redis.asyncio.Redis
) -> None:
    await _fill(registry)
    before = await _snapshot(registry)
    await raw.flushall()
    assert await _snapshot(registry) == before
    await registry.indexer.ensure()
    assert await registry.catalog.epoch() is not None
    assert await _snapshot(registry) == before


async def test_an_adapter_can_be_shared_while_there_is_no_index(
    registry: Registry, raw: redis.asyncio.Redis
) -> None:
    await _fill(registry)
    await raw.flushall()
    await registry.sharing.set("acme", "chat", SharingChange(PUBLIC), "me")
    found = await registry.catalog.find("acme/chat", "live")
    assert found.adapter is not None and found.adapter.visibility == PUBLIC


async def test_a_read_during_which_redis_is_flushed_answers_from_before_or_not_at_all(
    registry: Registry, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is flushed after every command: a read that took two would take nothing for no more."""
    await publish(registry, "sql", 1)
    await registry.tenants.set(TenantRecord("default", max_versions=9))
    catalog = registry.catalog
    blobs = [file.sha256 for file in (await catalog.find("default/sql", "all")).versions[0].files]
    epoch = await catalog.epoch()
    reads: dict[str, Callable[[], Awaitable[object]]] = {
        "bases": catalog.bases,
        "usage": lambda: catalog.usage("default"),
        "known_blobs": lambda: catalog.known_blobs("default", blobs),
        "find": lambda: catalog.find("default/sql", "tag", "latest"),
        "page": lambda: catalog.page("names", "-", "+", 10, which="versions"),
        "position": catalog.position,
    }
    true = {name: await read() for name, read in reads.items()}
    assert true["position"] == (epoch, 3)
    client = catalog._redis
    execute = client.execute_command

    async def execute_and_flush(*arguments: object, **options: object) -> object:
        answer = await execute(*arguments, **options)
        await raw.flushall()
        return answer

    saved = {key: await raw.dump(key) for key in await raw.keys("*")}
    for name, read in reads.items():
        for key, value in saved.items():
            await raw.restore(key, 0, value, replace=True)
        with monkeypatch.context() as patch:
            patch.setattr(client, "execute_command", execute_and_flush)
            assert await read() == true[name]


async def test_a_rebuild_that_lost_its_lease_leaves_that_of_another(
    registry: Registry, raw: redis.asyncio.Redis
) -> None:
    epoch = await registry.catalog.begin_rebuild()
    assert epoch is not None
    await raw.set(f"{PREFIX}rebuild", "another")
    await registry.catalog.release_rebuild(epoch)
    assert await raw.get(f"{PREFIX}rebuild") == b"another"
    await registry.catalog.release_rebuild("another")
    assert await raw.get(f"{PREFIX}rebuild") is None


async def _go_back(raw: redis.asyncio.Redis, dump: dict[bytes, bytes]) -> None:
    """What a Redis that starts from an old dump holds."""
    await raw.flushall()
    for key, value in dump.items():
        await raw.restore(key, 0, value)


async def _dump(raw: redis.asyncio.Redis) -> dict[bytes, bytes]:
    return {key: await raw.dump(key) for key in await raw.keys("*")}


@pytest.mark.parametrize("rebuilt_since", [False, True])
async def test_an_index_that_went_back_in_time_is_never_read_and_is_replaced(
    registry: Registry, raw: redis.asyncio.Redis, rebuilt_since: bool
) -> None:
    """A restart from an old dump, or a failover to a replica that lacks the last writes."""
    await publish(registry, "sql", 1)
    old = await _dump(raw)
    old_epoch = await registry.catalog.epoch()
    await publish(registry, "sql", 2)
    if rebuilt_since:
        await registry.indexer.rebuild()
        assert await _version_of(registry, "sql") == 2
    await _go_back(raw, old)
    assert await registry.catalog.epoch() == old_epoch
    with pytest.raises(CatalogDown):
        await registry.catalog.page("names", "-", "+", 10, which="versions")
    assert await _version_of(registry, "sql") == 2, "read from the objects"
    await registry.indexer.ensure()
    assert await _version_of(registry, "sql") == 2
    assert await registry.catalog.epoch() != old_epoch


async def test_a_writer_replaces_an_index_that_went_back_in_time(
    registry: Registry, raw: redis.asyncio.Redis
) -> None:
    await publish(registry, "sql", 1)
    old = await _dump(raw)
    await publish(registry, "sql", 2)
    await _go_back(raw, old)
    await publish(registry, "sql", 3)
    page = await registry.catalog.page("names", "-", "+", 10, which="versions")
    assert [len(found.versions) for _, found in page.adapters] == [3]


async def test_a_change_that_never_reached_the_index_is_repaired(registry: Registry) -> None:
    """Its writer noted it as pending, changed the object and died."""
    await publish(registry, "sql", 1)
    await publish(registry, "sql", 2)
    await registry.catalog.note_pending("default/sql")
    place = TagAddress("default", "sql", "latest")
    digest = (await registry.lookup.resolve(parse_ref("sql:v1"), ROOT)).version.digest
    await registry.tags.move(place, lambda _: [TagTarget(1, digest)], "", "dead-writer")
    assert await _version_of(registry, "sql") == 2
    await registry.indexer.repair(0.0)
    assert await _version_of(registry, "sql") == 1


@pytest.mark.parametrize(
    "damaged",
    [
        layout.adapter("default", "ill"),
        layout.version("default", "ill", 1),
        layout.tag("default", "ill", "latest"),
        layout.base("ill"),
    ],
)
async def test_a_damaged_document_hides_no_other_from_a_rebuilt_index(
    registry: Registry, caplog: pytest.LogCaptureFixture, damaged: str
) -> None:
    for seed, name in enumerate(("ill", "well")):
        await publish(registry, name, seed, visibility=PUBLIC)
    await registry.store.put(damaged, b"{")
    await registry.indexer.rebuild()
    await registry.indexer.refresh("default/ill")
    stranger = Access("other", "", frozenset({"reader"}))
    found = await registry.lookup.resolve(parse_ref("default/well"), stranger)
    assert found.version.version == 1
    assert "a damaged document was skipped" in caplog.text
    if damaged == layout.adapter("default", "ill"):
        with pytest.raises(AdapterNotFound):
            await registry.lookup.resolve(parse_ref("default/ill:v1"), stranger)


async def test_a_name_that_changes_during_a_rebuild_is_read_again(registry: Registry) -> None:
    await publish(registry, "sql", 1)
    epoch = await registry.catalog.begin_rebuild()
    assert epoch is not None
    await registry.indexer._fill(epoch)
    await publish(registry, "sql", 2)
    assert await registry.catalog.switch(epoch) == ["default/sql"]
    items = await registry.indexer._items_of("default/sql")
    await registry.catalog.apply_many(epoch, [IndexChange("default/sql", items)])
    assert await registry.catalog.switch(epoch) is True
    assert await _version_of(registry, "sql") == 2


async def test_uploads_and_rebuilds_at_the_same_time_lose_nothing(registry: Registry) -> None:
    async def rebuild() -> None:
        for _ in range(5):
            await registry.indexer.rebuild()

    uploads = [publish(registry, f"a{seed % 3}", seed) for seed in range(9)]
    await asyncio.gather(rebuild(), *uploads)
    grown = await _snapshot(registry)
    await registry.indexer.rebuild()
    assert await _snapshot(registry) == grown
    assert isinstance(grown, list) and len(grown) == 9


async def test_of_two_replicas_that_find_no_index_one_rebuilds(
    registry: Registry, raw: redis.asyncio.Redis, metadata_url: str
) -> None:
    await publish(registry, "sql", 1)
    other = assemble(registry.store, Catalog(connect_redis(metadata_url)))
    await raw.flushall()
    await asyncio.gather(registry.indexer.ensure(), other.indexer.ensure())
    assert await _version_of(other, "sql") == 1
    epochs = {key.split(b":")[1] async for key in raw.scan_iter(f"{PREFIX}*:seq")}
    assert len(epochs) <= 1
    await other.catalog.close()


async def test_older_documents_never_replace_newer_ones_in_the_index(registry: Registry) -> None:
    await publish(registry, "sql", 1)
    stale = await registry.indexer._items_of("default/sql")
    await publish(registry, "sql", 2)
    await registry.catalog.apply("default/sql", stale)
    assert await _version_of(registry, "sql") == 2


async def test_the_embedded_server_comes_back_after_a_kill_and_is_filled_again(
    tmp_path: Path,
) -> None:
    server = MetadataServer(tmp_path)
    await server.start()
    catalog = Catalog(connect_redis(server.url))
    house = assemble(open_store(f"file://{tmp_path}/objects"), catalog)
    await house.indexer.start()
    await house.bases.register(tiny_base(), replace=False)
    await publish(house, "sql", 1)
    assert server._process is not None
    server._process.kill()
    assert await _version_of(house, "sql") == 1
    while True:
        try:
            await house.indexer.ensure()
            break
        except CatalogDown:
            await asyncio.sleep(0.05)
    assert (await catalog.find("default/sql", "all")).versions[0].version == 1
    await catalog.close()
    await server.stop()


async def test_a_second_registry_does_not_start_an_embedded_server_in_the_same_folder(
    tmp_path: Path,
) -> None:
    """It would take the socket of the first one, whose clients would miss what it publishes."""
    server = MetadataServer(tmp_path)
    await server.start()
    with pytest.raises(InvalidRequest, match="LORAPLEX_METADATA"):
        MetadataServer(tmp_path)
    await server.stop()
    other = MetadataServer(tmp_path)
    await other.start()
    await other.stop()


async def test_a_base_added_by_another_replica_is_seen_after_a_repair(registry: Registry) -> None:
    await registry.catalog.note_pending("bases")
    base = tiny_base("second")
    await documents.create(registry.store, layout.base(base.base_id), base)
    await registry.indexer.repair(0.0)
    assert [b.base_id for b in await registry.catalog.bases()] == ["example/tiny", "second"]
