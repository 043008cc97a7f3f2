"""The pages of lists: in order, without gaps, and of a bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

from loraplex.errors import InvalidRequest, NotFound
from loraplex.refs import parse_ref
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.callers import note_read
from loraplex_services.registry.access import lookup
from loraplex_services.registry.access.lookup import Query
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api import server
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index import catalog as catalog_module
from loraplex_services.registry.index.found import Cursor
from loraplex_services.registry.index.redis_calls import PREFIX, CatalogDown
from loraplex_services.registry.records import PUBLIC
from tests.registry.conftest import ServedRegistry
from tests.registry.house import publish, upload

ROOT = Access("default", "", frozenset({"root", "admin"}))
KINDS = ("all", "live")


async def _raise_down(*args: object, **options: object) -> None:
    raise CatalogDown("away")


@pytest.mark.parametrize("index", ["there", "lost"])
async def test_pages_follow_each_other_without_gap_or_double(
    served: ServedRegistry, tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5):
        await upload(served.client, tmp_path, f"a{seed % 2}", seed)
    if index == "lost":
        monkeypatch.setattr(served.registry.catalog, "page", _raise_down)
    seen: list[tuple[str, int]] = []
    request = pb.ListAdaptersRequest(page_size=2, all_versions=True)
    while True:
        page = await served.client._stub.ListAdapters(request)
        seen += [(version.name, version.version) for version in page.versions]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert seen == [("a0", 1), ("a0", 2), ("a0", 3), ("a1", 1), ("a1", 2)]
    with pytest.raises(InvalidRequest, match="token"):
        request.page_token = "nonsense"
        await served.client._channel.call(served.client._stub.ListAdapters, request)


@pytest.mark.hostile
async def test_a_page_of_versions_with_long_labels_is_shorter(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of them would be larger than the messages that clients receive."""
    monkeypatch.setattr(server, "MAX_PAGE_BYTES", 2000)
    for seed in range(4):
        await upload(
            served.client, tmp_path, "sql", seed, labels={f"{n}": 200 * "x" for n in range(4)}
        )
    request = pb.ListAdaptersRequest(all_versions=True)
    page = await served.client._stub.ListAdapters(request)
    assert [version.version for version in page.versions] == [1]
    listed = served.client.list(name="sql", all_versions=True)
    assert [version.version async for version in listed] == [1, 2, 3, 4]


@pytest.fixture
def num_read() -> Iterator[list[int]]:
    """Documents that are read as part of the call of this test."""
    found: list[int] = []
    token = note_read.set(found.append)
    yield found
    note_read.reset(token)


@pytest.mark.hostile
async def test_what_is_missing_is_said_without_reading_all_versions_and_tags(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_MAX_NEWEST", 3)
    for seed in range(6):
        await publish(registry, "sql", seed, *(f"t{seed}-{n}" for n in range(60)))
    await registry.deletion.version("default", "sql", 5, "me", force=True, purge=False)
    found = await registry.lookup.newest("default", "sql")
    assert [version.version for version in found.versions] == [3, 4, 6]
    assert 0 < len(found.tags) < 100
    stranger = Access("acme", "key", frozenset({"reader"}))
    for access, why in ((ROOT, "v3, v4, v6"), (stranger, "no adapter default/sql")):
        with pytest.raises(NotFound, match=why):
            await registry.lookup.resolve(parse_ref("default/sql:v9"), access)


@pytest.mark.hostile
async def test_a_call_counts_by_what_it_reads_and_shows(
    registry: Registry, num_read: list[int]
) -> None:
    for seed in range(3):
        await publish(registry, "sql", seed, *(f"t{seed}-{n}" for n in range(30)))
    num_read.clear()
    await registry.lookup.resolve(parse_ref("default/sql:t0-1"), ROOT)
    assert num_read == [1 + 3 * 30 + 1]
    num_read.clear()
    await registry.lookup.page(Query(all_versions=True), ROOT, 10, Cursor())
    assert num_read == [3 + 3 * 30 + 1]


@pytest.mark.hostile
async def test_a_change_of_an_adapter_counts_by_the_versions_that_watches_read(
    registry: Registry, num_read: list[int]
) -> None:
    for seed in range(3):
        await publish(registry, "sql", seed)
    await registry.deletion.version("default", "sql", 2, "me", force=True, purge=False)
    feed = registry.catalog.feed
    async with feed.joined(), feed.joined(), feed.joined(lambda record: False):
        num_read.clear()
        await registry.sharing.describe("default", "sql", "words", {}, (), "me")
    assert num_read == [2 * 2]


@pytest.mark.hostile
async def test_a_refused_call_for_an_own_adapter_counts_by_what_it_reads(
    registry: Registry, num_read: list[int]
) -> None:
    """That is the version that had this content, and all tags."""
    for seed in range(3):
        done = await publish(registry, "sql", seed, f"t{seed}", latest=False)
    await registry.deletion.version("default", "sql", 3, "me", force=True, purge=False)
    deleted = f"default/sql@{done.version.digest}"
    for ref, count in ((deleted, 1 + 2), ("default/sql:v9", 2)):
        num_read.clear()
        with pytest.raises(NotFound):
            await registry.lookup.resolve(parse_ref(ref), ROOT)
        assert num_read[0] == count
    num_read.clear()
    stranger = Access("acme", "key", frozenset({"reader"}))
    with pytest.raises(NotFound, match="no adapter default/sql"):
        await registry.lookup.resolve(parse_ref(deleted), stranger)
    assert num_read == [0], "nothing tells that there is a private adapter"


@pytest.mark.hostile
async def test_a_short_page_reads_few_adapters(registry: Registry, num_read: list[int]) -> None:
    for number in range(6):
        await publish(registry, f"sql-{number}", number)
    num_read.clear()
    page, cursor = await registry.lookup.page(Query(), ROOT, 2, Cursor())
    assert [entry.version.name for entry in page] == ["sql-0", "sql-1"]
    assert cursor is not None and num_read == [3 * 2]


@pytest.mark.hostile
async def test_a_page_of_versions_reads_few_of_them(
    registry: Registry, num_read: list[int]
) -> None:
    """Each page of a list read all versions of the adapter."""
    for seed in range(9):
        await publish(registry, "acme/sql", seed, latest=False)
    await registry.deletion.version("acme", "sql", 4, "me", force=True, purge=False)
    await publish(registry, "acme/web", 10, latest=False)
    await publish(registry, "globex/open", 11, latest=False, visibility=PUBLIC)
    everything = ["acme/sql:v1", "acme/sql:v2", "acme/sql:v3", "acme/sql:v5", "acme/sql:v6",
                  "acme/sql:v7", "acme/sql:v8", "acme/sql:v9", "acme/web:v1",
                  "globex/open:v1"]  # fmt: skip
    for access in (ROOT, Access("acme", "key", frozenset({"reader"}))):
        for size in (1, 2, 3, 100):
            found, cursor = list[str](), Cursor()
            while cursor is not None:
                num_read.clear()
                query = Query(all_versions=True)
                page, cursor = await registry.lookup.page(query, access, size, cursor)
                found += [entry.version.ref for entry in page]
                assert len(page) <= size and sum(num_read) <= 2 * (size + 1) + 2
            assert found == everything


async def test_a_filtered_list_shows_no_own_version_twice(registry: Registry) -> None:
    """Own adapters that others see are in both lists that are read, and these end in different
    places."""
    for seed in range(3):
        await publish(registry, "aaa/open", seed, visibility=PUBLIC)
    for seed in range(3, 9):
        await publish(registry, "acme/sql", seed, visibility=PUBLIC, labels={"team": "one"})
    for seed in range(9, 12):
        await publish(registry, "globex/open", seed, visibility=PUBLIC, labels={"team": "one"})
    expected = [f"acme/sql:v{number}" for number in range(1, 7)]
    expected += [f"globex/open:v{number}" for number in range(1, 4)]
    acme = Access("acme", "key", frozenset({"reader"}))
    query = Query(labels=(("team", "one"),), all_versions=True)
    for size in range(1, 12):
        found, cursor = list[str](), Cursor()
        while cursor is not None:
            page, cursor = await registry.lookup.page(query, acme, size, cursor)
            found += [entry.version.ref for entry in page]
        assert found == expected, size


@pytest.mark.hostile
async def test_a_list_compares_no_version_with_the_tags_of_others(registry: Registry) -> None:
    """A page of 1,000 versions kept a registry busy for 2 s where there were as many tags."""
    for seed in range(4):
        await publish(registry, "sql", seed, f"t{seed}", f"u{seed}")
    page, _ = await registry.lookup.page(Query(all_versions=True), ROOT, 10, Cursor())
    found = [(entry.version.version, [tag.tag for tag in entry.tags]) for entry in page]
    assert found == [(1, ["t0", "u0"]), (2, ["t1", "u1"]), (3, ["t2", "u2"]),
                     (4, ["latest", "t3", "u3"])]  # fmt: skip


async def test_parts_of_an_adapter_are_put_together(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(7):
        await publish(registry, "sql", seed, f"t{seed}")
    for number in (2, 7):
        await registry.deletion.version("default", "sql", number, "me", force=True, purge=False)
    whole = await registry.catalog.find("default/sql", "all")
    monkeypatch.setattr(catalog_module, "MAX_VERSIONS_AT_ONCE", 2)
    assert await registry.catalog.find("default/sql", "all") == whole
    assert [version.version for version in whole.versions] == [1, 2, 3, 4, 5, 6, 7]
    live = await registry.catalog.find("default/sql", "live")
    assert live.versions == tuple(v for v in whole.versions if not v.deleted)
    assert live.tags == whole.tags != ()


@pytest.mark.hostile
async def test_one_read_looks_at_a_bounded_number_of_deleted_versions_of_all_adapters(
    registry: Registry, metadata_url: str
) -> None:
    """Redis answers nobody else in the meantime, and a page may have 500 adapters."""
    epoch = await registry.catalog.epoch()
    async with redis.asyncio.Redis.from_url(metadata_url) as client:
        for seed, name in enumerate("abc"):
            await publish(registry, name, seed)
            key = f"{PREFIX}{epoch}:a:default/{name}"
            value = (await client.hget(key, "v1")).replace(b'"version":1', b'"version":1500')
            await client.hset(key, mapping={"newest": 1500, "highest": 1500, "v1500": value})
            await client.hdel(key, "v1")
    page = await registry.catalog.page("names", "-", "+", 10, which="versions")
    assert page.end == Cursor("default/b", 500)
    found = await asyncio.gather(
        *(registry.catalog.find(f"default/{name}", kind) for name in "abc" for kind in KINDS)
    )
    assert [[version.version for version in each.versions] for each in found] == 6 * [[1500]]
    listed, cursor = await registry.lookup.page(Query(all_versions=True), ROOT, 10, Cursor())
    assert [entry.version.ref for entry in listed] == [f"default/{name}:v1500" for name in "abc"]
    assert cursor is None


@pytest.mark.hostile
async def test_a_page_of_current_versions_with_long_labels_is_read_in_parts(
    registry: Registry,
) -> None:
    for seed in range(4):
        await publish(registry, f"sql-{seed}", seed, labels={"note": 600_000 * "x"})
    page = await registry.catalog.page("names", "-", "+", 10, which="current")
    assert page.end == Cursor("default/sql-1")
    listed, cursor = await registry.lookup.page(Query(), ROOT, 10, Cursor())
    assert [entry.version.name for entry in listed] == [f"sql-{seed}" for seed in range(4)]
    assert cursor is None
