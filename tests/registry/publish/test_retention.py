"""Updates of one adapter are retired, and ephemeral versions go when their time is over."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os

import pytest
import redis.asyncio

from loraplex.errors import AdapterNotFound, DataLoss, InvalidRequest
from loraplex.refs import parse_ref
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common import documents
from loraplex_services.common.documents import decode
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.access.sharing import SharingChange
from loraplex_services.registry.api.publish_options import options_from_proto
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index import found as found_module
from loraplex_services.registry.index import redis_calls
from loraplex_services.registry.publish import claims, retention
from loraplex_services.registry.records import PRIVATE, PUBLIC, VersionRecord
from tests.registry.house import publish
from tests.s3_servers import only_files

ROOT = Access("default", "", frozenset({"root", "admin"}))


async def _live(registry: Registry, name: str) -> list[int]:
    found = await registry.catalog.find(f"default/{name}", "all")
    return [version.version for version in found.versions if not version.deleted]


async def _update(registry: Registry, name: str, seed: int, *tags: str) -> None:
    done = await publish(registry, name, seed, *tags, keep_versions=2)
    registry.retention.published(done.version)
    await registry.retention.retire("default", name, 2)


async def test_only_the_newest_updates_and_those_with_a_tag_stay(registry: Registry) -> None:
    await publish(registry, "policy", 1)
    await _update(registry, "policy", 2, "best")
    for seed in range(3, 7):
        await _update(registry, "policy", seed)
    assert await _live(registry, "policy") == [1, 2, 5, 6]
    latest = await registry.lookup.resolve(parse_ref("policy"), ROOT)
    assert latest.version.version == 6


async def test_an_update_that_latest_points_at_again_stays(registry: Registry) -> None:
    for seed in (1, 2, 3):
        await publish(registry, "policy", seed, keep_versions=2)
    await publish(registry, "policy", 1, keep_versions=2)
    await registry.retention.retire("default", "policy", 2)
    assert await _live(registry, "policy") == [1, 2, 3]


async def test_bytes_of_a_retired_version_wait_for_the_collector_and_no_longer(
    registry: Registry,
) -> None:
    for seed in (1, 2, 3):
        await _update(registry, "policy", seed)
    key = layout.version("default", "policy", 1)
    assert b'"purged":true' in (await registry.store.get(key)).data
    assert registry.retention.num_retired == 1


async def test_the_task_retires_what_was_published(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "RETIRE_PAUSE_S", 0.01)
    for seed in (1, 2, 3):
        done = await publish(registry, "policy", seed, keep_versions=1)
        registry.retention.published(done.version)
    task = asyncio.create_task(registry.retention.run())
    while await _live(registry, "policy") != [3]:
        await asyncio.sleep(0.01)
    task.cancel()


@only_files
async def test_what_could_not_be_retired_is_retired_after_the_next_publication(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "RETIRE_PAUSE_S", 0.01)
    for seed in (1, 2):
        done = await publish(registry, "policy", seed, keep_versions=1)
        registry.retention.published(done.version)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _full)
        task = asyncio.create_task(registry.retention.run())
        while "versions not retired" not in caplog.text:
            await asyncio.sleep(0.01)
    assert await _live(registry, "policy") == [1, 2]
    other = await publish(registry, "other", 3, keep_versions=1)
    registry.retention.published(other.version)
    while await _live(registry, "policy") != [2]:
        await asyncio.sleep(0.01)
    task.cancel()


def _full(descriptor: int) -> None:
    """`os.fsync` on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_an_update_reads_no_more_records_after_many_others(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_decoded = 0

    def counting(kind: type, data: bytes) -> object:
        nonlocal num_decoded
        num_decoded += kind is VersionRecord
        return decode(kind, data)

    for module in (found_module, documents):
        monkeypatch.setattr(module, "decode", counting)
    counts = []
    for seed in range(1, 31):
        await _update(registry, "policy", seed)
        counts.append(num_decoded)
        num_decoded = 0
    assert counts[-1] == counts[4] <= 20
    assert await _live(registry, "policy") == [29, 30]


async def test_a_version_that_the_index_lacks_is_found_and_its_number_never_given_again(
    registry: Registry,
) -> None:
    for seed in (1, 2, 3):
        await publish(registry, "policy", seed)
    for number, key in ((4, 3), (6, 5)):  # one after, then one below the highest that it knows
        record = await registry.versions.read("default", "policy", 1)
        assert record is not None
        unseen = dataclasses.replace(record, version=number, digest=f"sha256:{number:064x}")
        assert await documents.create(
            registry.store, layout.version("default", "policy", number), unseen
        )
        done = await publish(registry, "policy", 10 + key)
        assert done.version.version == number + 1
    again = await publish(registry, "policy", 1)
    assert (again.version.version, again.created) == (1, False)


async def test_a_lasting_publication_of_an_update_is_a_version_of_its_own(
    registry: Registry,
) -> None:
    update = await publish(registry, "policy", 1, keep_versions=1)
    lasting = await publish(registry, "policy", 1)
    assert (update.version.version, lasting.version.version) == (1, 2)
    again = await publish(registry, "policy", 1, keep_versions=1)
    assert (again.version.version, again.created) == (2, False)


async def test_an_ephemeral_version_ends_with_its_time(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await publish(registry, "doc-1", 1, ttl_s=60.0)
    assert done.version.expires_s == pytest.approx(done.version.created_s + 60.0)
    await registry.retention.expire()
    assert await _live(registry, "doc-1") == [1]
    monkeypatch.setattr(retention, "now_s", lambda: done.version.expires_s + 1)
    await registry.retention.expire()
    assert await _live(registry, "doc-1") == []
    with pytest.raises(AdapterNotFound):
        await registry.lookup.resolve(parse_ref("doc-1"), ROOT)
    await registry.retention.expire()
    assert registry.retention.num_retired == 1


async def test_an_adapter_whose_ephemeral_versions_ended_leaves_the_index_and_keeps_its_numbers(
    registry: Registry, metadata_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = redis.asyncio.Redis.from_url(metadata_url)
    epoch = await registry.catalog.epoch()

    async def seconds_left(name: str) -> list[int]:
        kinds = ("a", "t")
        return [
            await raw.ttl(f"{redis_calls.PREFIX}{epoch}:{kind}:default/{name}") for kind in kinds
        ]

    ephemeral = await publish(registry, "doc-1", 1, ttl_s=60.0)
    await publish(registry, "sql", 2)
    await publish(registry, "sql", 3, ttl_s=60.0)
    await registry.deletion.version("default", "sql", 1, "tester", force=True, purge=False)
    assert await seconds_left("doc-1") == await seconds_left("sql") == [-1, -1]
    monkeypatch.setattr(retention, "now_s", lambda: ephemeral.version.expires_s + 60.0)
    await registry.retention.expire()
    assert all(0 < left <= 120 for left in await seconds_left("doc-1"))
    assert await seconds_left("sql") == [-1, -1], "a version of it was no ephemeral one"
    assert (await publish(registry, "doc-1", 1, ttl_s=60.0)).version.version == 2
    assert await seconds_left("doc-1") == [-1, -1]
    await raw.delete(*(f"{redis_calls.PREFIX}{epoch}:{kind}:default/doc-1" for kind in "at"))
    assert (await publish(registry, "doc-1", 4, ttl_s=60.0)).version.version == 3
    await raw.aclose()


async def test_an_adapter_is_listed_for_other_tenants_only_while_it_has_a_version(
    registry: Registry, metadata_url: str
) -> None:
    raw = redis.asyncio.Redis.from_url(metadata_url)
    listed = f"{redis_calls.PREFIX}{await registry.catalog.epoch()}:shared"
    await publish(registry, "doc-1", 1, ttl_s=60.0)
    await registry.sharing.set("default", "doc-1", SharingChange(PUBLIC), "tester")
    assert await raw.zrange(listed, 0, -1) == [b"default/doc-1"]
    await registry.deletion.end([("default/doc-1", 1)], "tester")
    assert await raw.zrange(listed, 0, -1) == []
    await publish(registry, "doc-1", 2, ttl_s=60.0)
    assert await raw.zrange(listed, 0, -1) == [b"default/doc-1"]
    await registry.sharing.set("default", "doc-1", SharingChange(PRIVATE), "tester")
    assert await raw.zrange(listed, 0, -1) == []
    await raw.aclose()


async def test_a_rebuilt_index_knows_when_ephemeral_versions_end(registry: Registry) -> None:
    done = await publish(registry, "doc-1", 1, ttl_s=60.0)
    await registry.indexer.rebuild()
    assert await registry.catalog.expired(done.version.expires_s) == [("default/doc-1", 1)]
    assert await registry.catalog.expired(done.version.expires_s - 1) == []


async def test_what_a_power_failure_undoes_of_an_end_ends_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await publish(registry, "doc-1", 1, ttl_s=60.0)
    keys = [layout.version("default", "doc-1", 1), layout.tag("default", "doc-1", "latest")]
    before = await registry.store.get_many(keys)
    monkeypatch.setattr(retention, "now_s", lambda: done.version.expires_s + 1)
    await registry.retention.expire()
    for key, data in zip(keys, before, strict=True):
        assert data is not None
        await registry.store.put(key, data)
    await registry.indexer.rebuild()
    assert await _live(registry, "doc-1") == [1]
    await registry.retention.expire()
    assert await _live(registry, "doc-1") == []
    assert (await publish(registry, "doc-1", 2)).version.version == 2


async def test_a_version_whose_creation_was_undone_ends_and_its_number_stays_used(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await publish(registry, "doc-1", 1, ttl_s=60.0)
    await registry.store.delete(layout.version("default", "doc-1", 1))
    await registry.store.delete(layout.tag("default", "doc-1", "latest"))
    monkeypatch.setattr(retention, "now_s", lambda: done.version.expires_s + 1)
    await registry.retention.expire()
    assert await registry.catalog.expired(done.version.expires_s) == []
    assert (await publish(registry, "doc-1", 2)).version.version == 2


async def test_an_end_that_a_crash_interrupted_is_completed(registry: Registry) -> None:
    done = await publish(registry, "doc-1", 1, ttl_s=60.0)
    await registry.catalog.note_pending("default/doc-1")
    assert await registry.deletion._write_tombstone("default", "doc-1", 1, True, done.version)
    assert await registry.deletion.end([("default/doc-1", 1)], "another") == 0
    await registry.indexer.repair(0.0)
    assert await _live(registry, "doc-1") == []
    assert await registry.catalog.expired(done.version.expires_s) == []


async def test_ephemeral_versions_of_one_moment_share_entries_in_the_audit_log(
    registry: Registry,
) -> None:
    names = [f"doc-{seed}" for seed in range(6)]
    shown = [f"Doc-{seed}" for seed in range(6)]
    publishing = (
        publish(registry, name, seed, ttl_s=60.0, spelling=shown[seed])
        for seed, name in enumerate(names)
    )
    done = await asyncio.gather(*publishing)
    assert await registry.deletion.end([(f"default/{name}", 1) for name in names], "tester") == 6
    entries, _ = await registry.audit.page("default", 100)
    published = [entry for entry in entries if entry.action == "version.publish"]
    assert {version for entry in published for version in entry.details["versions"].split()} == {
        f"{name}:v1@{each.version.digest}" for name, each in zip(shown, done, strict=True)
    }
    [entry] = [entry for entry in entries if entry.action == "version.expire"]
    assert entry.details["versions"].split() == [f"{name}:v1" for name in shown]


async def test_a_version_that_is_damaged_does_not_keep_others_from_their_end(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    for seed, name in enumerate(("doc-1", "doc-2")):
        await publish(registry, name, seed, ttl_s=60.0)
    await registry.store.put(layout.version("default", "doc-1", 1), b"{")
    versions = [("default/doc-1", 1), ("default/doc-2", 1)]
    assert [await registry.deletion.end(versions, "tester") for _ in range(2)] == [1, 0]
    assert await _live(registry, "doc-2") == []
    assert "versions could not be deleted" in caplog.text
    with pytest.raises(DataLoss):
        await registry.deletion.end(versions[:1], "tester")
    entries, _ = await registry.audit.page("default", 100)
    expired = [entry.details["versions"] for entry in entries if entry.action == "version.expire"]
    assert expired == ["doc-2:v1"]


async def test_an_ended_version_shows_who_could_see_it_where_the_index_knows(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await publish(registry, "doc-1", 1, ttl_s=60.0)
    epoch, before = await registry.catalog.position()
    monkeypatch.setattr(retention, "now_s", lambda: done.version.expires_s + 1)
    await registry.retention.expire()
    events = await registry.catalog.events.read(epoch, before, 10)
    [ended] = [each.doc["doc"] for each in events if each.doc["kind"] == "version"]
    assert (ended["visibility"], ended["generation"]) == (PRIVATE, 2)


async def test_the_same_content_is_published_anew_before_its_time_is_over(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await publish(registry, "doc-1", 1, ttl_s=60.0)
    again = await publish(registry, "doc-1", 1, ttl_s=60.0)
    assert again.version.version == 1
    monkeypatch.setattr(claims, "now_s", lambda: first.version.created_s + 40.0)
    late = await publish(registry, "doc-1", 1, ttl_s=60.0)
    assert (late.version.version, late.created) == (2, True)
    assert late.version.digest == first.version.digest
    lasting = await publish(registry, "doc-1", 1)
    assert (lasting.version.version, lasting.version.expires_s) == (3, 0.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (pb.PublishOptions(name="a", ttl_s=-1), "options.ttl_s"),
        (pb.PublishOptions(name="a", ttl_s=float("nan")), "options.ttl_s"),
        (pb.PublishOptions(name="a", ttl_s=31 * 86_400.0), "options.ttl_s"),
        (pb.PublishOptions(name="a", keep_versions=1001), "options.keep_versions"),
        (
            pb.PublishOptions(name="a", ttl_s=1, visibility=pb.VISIBILITY_PUBLIC),
            "options.visibility",
        ),
    ],
    ids=str,
)
def test_refusals_name_the_option(options: pb.PublishOptions, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        options_from_proto(options, "default")
    assert caught.value.violations[0].field == field
