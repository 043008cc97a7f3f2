"""Watches of adapters with many or large versions fit the memory of Redis and into messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import redis.asyncio

from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry.access.lookup import visible_batches
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.access.sharing import SharingChange
from loraplex_services.registry.api import convert
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index import catalog as catalog_module
from loraplex_services.registry.index import events as events_module
from loraplex_services.registry.index import feed as feed_module
from loraplex_services.registry.index import watch as watch_module
from loraplex_services.registry.index.items import version_item
from loraplex_services.registry.index.redis_calls import PREFIX
from loraplex_services.registry.index.watch import Batch, watch
from loraplex_services.registry.records import PRIVATE, PUBLIC
from tests.registry.house import publish
from tests.registry.index.test_watch import Mirror

pytestmark = pytest.mark.hostile
ACME = Access("acme", "key", frozenset({"reader"}))


async def _num_events(registry: Registry, metadata_url: str) -> int:
    raw = redis.asyncio.Redis.from_url(metadata_url)
    count = await raw.xlen(f"{PREFIX}{await registry.catalog.epoch()}:events")
    await raw.aclose()
    return int(count)


async def test_a_change_of_an_adapter_is_kept_once_and_told_for_each_of_its_versions(
    registry: Registry, metadata_url: str
) -> None:
    """An event for each of thousands of versions fills the memory of Redis."""
    for seed in (1, 2, 3):
        await publish(registry, "sql", seed)
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    token = mirror.token
    before = await _num_events(registry, metadata_url)
    for visibility in (PUBLIC, PRIVATE, PUBLIC):
        await registry.sharing.set("default", "sql", SharingChange(visibility), "me")
    assert await _num_events(registry, metadata_url) == before + 3
    await publish(registry, "sql", 4)
    for watcher in (mirror, Mirror(watch(registry.catalog, token))):
        await watcher.until("sql:latest", [4])
        assert [watcher.known[f"sql:v{number}"] for number in (1, 2, 3, 4)] == [PUBLIC] * 4


async def test_an_adapter_that_becomes_private_while_a_snapshot_is_read_is_private_at_its_end(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(registry, "sql", 1, visibility=PUBLIC)
    read_page, is_first = registry.catalog.page, True

    async def outdated(*args: Any, **options: Any) -> Any:
        nonlocal is_first
        page = await read_page(*args, **options)
        if is_first:
            is_first = False
            await registry.sharing.set("default", "sql", SharingChange(PRIVATE), "me")
        return page

    monkeypatch.setattr(registry.catalog, "page", outdated)
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    assert mirror.known["sql:v1"] == PRIVATE


async def test_a_version_of_an_adapter_that_became_private_meanwhile_is_private(
    registry: Registry,
) -> None:
    """Its writer read the adapter before, and gateways would let others run it."""
    first = (await publish(registry, "sql", 1, visibility=PUBLIC)).version
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    outdated = (await registry.catalog.find("default/sql", "adapter")).adapter
    await registry.sharing.set("default", "sql", SharingChange(PRIVATE), "me")
    second = version_item(dataclasses.replace(first, version=2), outdated)
    await registry.catalog.apply("default/sql", [second])
    await publish(registry, "other", 2)
    await mirror.until("other:latest", [1])
    assert mirror.known["sql:v1"] == mirror.known["sql:v2"] == PRIVATE


async def test_large_events_take_a_bounded_part_of_the_memory_of_redis(
    registry: Registry, metadata_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "MAX_EVENT_BYTES", 20_000)
    mirror = Mirror(watch(registry.catalog, ""))
    await mirror.snapshot()
    for seed in range(12):
        await publish(registry, "sql", seed, latest=False, labels={"note": 4000 * "x"})
    assert 3 <= await _num_events(registry, metadata_url) <= 5
    await mirror.until("sql:v12", PRIVATE)
    assert [mirror.known[f"sql:v{number}"] for number in range(1, 13)] == [PRIVATE] * 12
    late = Mirror(watch(registry.catalog, mirror.token.partition(":")[0] + ":1"))
    await late.until("sql:v12", PRIVATE)
    assert late.snapshots == 1


async def test_large_events_take_a_bounded_part_of_the_memory_of_a_registry(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 events with long labels have 0.8 GB as JSON."""
    for module in (feed_module, events_module):
        monkeypatch.setattr(module, "MAX_READ_BYTES", 10_000)
    monkeypatch.setattr(feed_module, "MAX_KEPT_BYTES", 20_000)
    monkeypatch.setattr(events_module, "_EVENTS_AT_ONCE", 2)
    feed, mirror = registry.catalog.feed, Mirror(watch(registry.catalog, ""))
    epoch, begin = await registry.catalog.position()
    await mirror.snapshot()
    for seed in range(12):
        await publish(registry, "sql", seed, latest=False, labels={"note": 4000 * "x"})
        await mirror.until(f"sql:v{seed + 1}", PRIVATE)
    assert 3 <= feed.state()["num_kept_events"] <= 4
    assert len(await registry.catalog.events.read(epoch, begin, 12)) == 4
    late = Mirror(watch(registry.catalog, f"{epoch}:{begin}"))
    await late.until("sql:v12", PRIVATE)
    assert late.snapshots == 0
    assert [late.known[f"sql:v{number}"] for number in range(1, 13)] == [PRIVATE] * 12


async def test_the_versions_of_one_adapter_come_in_messages_that_gateways_can_receive(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that does not fit one message keeps every gateway from starting."""
    monkeypatch.setattr(convert, "MAX_PART_BYTES", 10_000)
    for seed in range(6):
        await publish(registry, "sql", seed, labels={"note": 4000 * "x"})
    messages: list[pb.WatchAdaptersResponse] = []
    async for batch in watch(registry.catalog, ""):
        messages += convert.batch_to_protos(batch, "before")
        if batch.ends_snapshot:
            break
    assert max(message.ByteSize() for message in messages) < 10_100
    versions = [event.version.version for each in messages for event in each.events]
    assert [number for number in versions if number] == [1, 2, 3, 4, 5, 6]
    assert [each.snapshot_begin for each in messages] == [True] + [False] * (len(messages) - 1)
    assert [each.snapshot_end for each in messages] == [False] * (len(messages) - 1) + [True]
    assert [each.resume_token for each in messages[:-1]] == [""] * (len(messages) - 1)


async def test_a_snapshot_reads_an_adapter_in_parts_and_its_tags_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis answered nobody else while it read 10,000 versions with long labels."""
    monkeypatch.setattr(watch_module, "_PAGE_VERSIONS", 2)
    for seed in range(7):
        await publish(registry, "sql", seed, f"t{seed}")
    await publish(registry, "web", 8)
    await registry.deletion.version("default", "sql", 3, "me", force=True, purge=False)
    batches: list[Batch] = []
    async for batch in watch(registry.catalog, ""):
        batches.append(batch)
        if batch.ends_snapshot:
            break
    found = [
        [event["doc"].get("version", event["doc"].get("tag")) for event in batch.events]
        for batch in batches
    ]
    tags = ["latest", "t0", "t1", "t3", "t4", "t5", "t6"]
    assert found == [[None], [1, 2], [4, 5], [6, 7, *tags], [1, "latest"], []], "a base is first"


async def test_a_watch_that_got_a_part_of_a_batch_resumes_before_it(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "MAX_PART_BYTES", 1)
    for seed in range(3):
        await publish(registry, "sql", seed)
    found = await registry.catalog.find("default/sql", "all")
    events = watch_module._version_events(found)
    whole = Batch(tuple(events), "e:9")
    tokens = [each.resume_token for each in convert.batch_to_protos(whole, "e:6")]
    assert tokens == ["e:6", "e:6", "e:9"]


async def test_a_tenants_snapshot_reads_no_private_adapters_of_others(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch of a tenant with few adapters cost as much as one of a gateway."""
    for number in range(3):
        await publish(registry, f"sql-{number}", number)
    await publish(registry, "open", 4, visibility=PUBLIC)
    await publish(registry, "acme/own", 5)
    await publish(registry, "acme/shown", 6, visibility=PUBLIC)
    read_page = registry.catalog.page
    scopes: list[str] = []

    async def noted(*args: Any, **options: Any) -> Any:
        page = await read_page(*args, **options)
        scopes.extend(scope for scope, _ in page.adapters)
        return page

    monkeypatch.setattr(registry.catalog, "page", noted)
    mirror = Mirror(visible_batches(registry.catalog, ACME, ""))
    await mirror.snapshot()
    assert {key for key in mirror.known if ":v" in key} == {"open:v1", "own:v1", "shown:v1"}
    assert {*scopes} == {"default/open", "acme/own", "acme/shown"}
    assert len(mirror.events) == len({*mirror.events})
    await publish(registry, "sql-0", 7, visibility=PUBLIC)
    await mirror.until("sql-0:v1", PUBLIC)


def _noted_finds(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Scope and kind of each look-up from now on."""
    find = registry.catalog.find
    found: list[tuple[str, str]] = []

    async def noted(scope: str, kind: str, selector: str = "") -> Any:
        found.append((scope, kind))
        return await find(scope, kind, selector)

    monkeypatch.setattr(registry.catalog, "find", noted)
    return found


async def test_tags_in_a_watch_are_not_looked_up_one_by_one(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look-up read all tags of the adapter: a million for an adapter with 1,000."""
    for name in ("default/open", "acme/own"):
        await publish(registry, name, 1, *(f"t{n}" for n in range(30)), visibility=PUBLIC)
    found = _noted_finds(registry, monkeypatch)
    mirror = Mirror(visible_batches(registry.catalog, ACME, ""))
    await mirror.snapshot()
    assert mirror.known["open:t29"] == mirror.known["own:t29"] == [1]
    assert found == [("default/open", "adapter")]


async def test_a_change_of_a_private_adapter_reads_its_versions_for_nobody_else(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each watch of another tenant read all of them, and showed none."""
    await publish(registry, "sql", 1)
    mirror = Mirror(visible_batches(registry.catalog, ACME, ""))
    await mirror.snapshot()
    found = _noted_finds(registry, monkeypatch)
    await registry.sharing.describe("default", "sql", "words", {}, (), "me")
    await publish(registry, "open", 2, visibility=PUBLIC)
    await mirror.until("open:v1", PUBLIC)
    assert ("default/sql", "live") not in found
    for visibility, shown in ((PUBLIC, PUBLIC), (PRIVATE, "deleted")):
        await registry.sharing.set("default", "sql", SharingChange(visibility), "me")
        await mirror.until("sql:v1", shown)
