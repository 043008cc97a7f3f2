"""Garbage collection: nothing that is needed goes, everything else does when it is old enough."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from loraplex.errors import DataLoss
from loraplex.refs import parse_ref
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api.downloads import chunks_of
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.maintenance.gc import MIN_AGE_S, RETENTION_S, Collector
from loraplex_services.registry.publish.uploads import SESSION_MAX_AGE_S
from tests.registry.house import ANY_AGE_S, adapter_files, opened, orphans, publish
from tests.s3_servers import only_files

ROOT = Access("default", "", frozenset({"root", "admin"}))


def _age(objects: Path, seconds: float) -> None:
    """Make every object look as if it was written this long ago."""
    then = time.time() - seconds
    for path in objects.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


async def _read_all(registry: Registry, ref: str) -> int:
    version = (await registry.lookup.resolve(parse_ref(ref), ROOT)).version
    return sum([len(chunk.data) async for chunk in chunks_of(registry.store, version)])


@only_files
async def test_live_versions_are_kept_whatever_their_age(
    registry: Registry, objects_folder: Path
) -> None:
    await publish(registry, "sql", 1)
    _age(objects_folder, 100 * MIN_AGE_S)
    await Collector(registry.store).collect()
    assert await _read_all(registry, "sql") > 0


async def test_young_bytes_are_kept_though_nothing_refers_to_them(registry: Registry) -> None:
    await registry.store.put(layout.blob("a" * 64), b"just written")
    session = await opened(registry, "sql", adapter_files(1))
    assert (await Collector(registry.store).collect()).deleted_objects == 0
    assert (await registry.publisher.finish(session)).version.version == 1


@only_files
async def test_old_unreferenced_blobs_and_dead_uploads_go(
    registry: Registry, objects_folder: Path
) -> None:
    await publish(registry, "sql", 1)
    await registry.store.put(layout.blob("a" * 64), b"left over")
    await opened(registry, "abandoned", adapter_files(2))
    _age(objects_folder, max(MIN_AGE_S, SESSION_MAX_AGE_S) + 60)
    planned = await Collector(registry.store).collect(dry_run=True)
    assert len(await orphans(registry)) == 1
    done = await Collector(registry.store).collect()
    assert (done.deleted_objects, done.deleted_bytes) == (
        planned.deleted_objects,
        planned.deleted_bytes,
    )
    assert await orphans(registry) == set()
    assert [info async for info in registry.store.list_objects(layout.UPLOADS)] == []
    assert await _read_all(registry, "sql") > 0


@only_files
async def test_deleted_versions_keep_their_bytes_until_retention_ends(
    registry: Registry, objects_folder: Path
) -> None:
    done = await publish(registry, "sql", 1)
    await registry.deletion.version("default", "sql", 1, "me", force=False, purge=False)
    _age(objects_folder, MIN_AGE_S + 60)
    manifest = layout.blob(done.version.digest)
    await Collector(registry.store).collect()
    assert await registry.store.head(manifest) is not None
    await Collector(registry.store, retention_s=0.0).collect()
    assert await registry.store.head(manifest) is None
    assert RETENTION_S > MIN_AGE_S


@only_files
async def test_purged_versions_lose_what_no_other_version_has(
    registry: Registry, objects_folder: Path
) -> None:
    first = await publish(registry, "sql", 1)
    second = await publish(registry, "sql", 2)
    await registry.deletion.version("default", "sql", 2, "me", force=False, purge=True)
    _age(objects_folder, MIN_AGE_S + 60)
    await Collector(registry.store).collect()
    shared = {file.sha256 for file in first.version.files}
    for file in second.version.files:
        kept = await registry.store.head(layout.blob(file.sha256)) is not None
        assert kept == (file.sha256 in shared)
    assert await _read_all(registry, "sql:v1") > 0


@only_files
async def test_content_published_again_after_its_purge_has_all_its_bytes(
    registry: Registry, objects_folder: Path
) -> None:
    await publish(registry, "sql", 1)
    await registry.deletion.version("default", "sql", 1, "me", force=False, purge=True)
    _age(objects_folder, MIN_AGE_S + 60)
    await Collector(registry.store).collect()
    done = await publish(registry, "sql", 1)
    assert done.version.version == 2
    assert await _read_all(registry, "sql") == done.version.size_bytes


async def test_content_published_while_its_old_bytes_are_collected_keeps_them(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst moment: nothing refers to them when the collector looks, all when it acts."""
    store, seen = registry.store, set[str]()
    clock_s, delete_if_older = store.clock_s, store.delete_if_older
    first = await publish(registry, "sql", 1)
    await registry.deletion.version("default", "sql", 1, "me", force=False, purge=True)
    published_s = await clock_s()
    while int(await clock_s()) == int(published_s):
        pass  # Stores may tell ages in whole seconds.

    async def a_day_later() -> float:
        return await clock_s() + MIN_AGE_S

    async def overtaken(key: str, modified_s: float) -> bool:
        if key.startswith(layout.BLOBS) and not seen:
            seen.add(key)
            await publish(registry, "sql", 1)
        return await delete_if_older(key, modified_s)

    monkeypatch.setattr(store, "clock_s", a_day_later)
    monkeypatch.setattr(store, "delete_if_older", overtaken)
    await Collector(store).collect()
    assert seen, "the collector meant to delete"
    assert await _read_all(registry, "sql:v2") == first.version.size_bytes
    monkeypatch.undo()
    await Collector(store, min_age_s=ANY_AGE_S, session_max_age_s=ANY_AGE_S).collect()
    assert await _read_all(registry, "sql:v2") == first.version.size_bytes
    assert await orphans(registry) == set()


@only_files
async def test_a_damaged_version_record_is_named_and_nothing_goes(
    registry: Registry, objects_folder: Path
) -> None:
    await publish(registry, "sql", 1)
    await registry.store.put(layout.blob("a" * 64), b"left over")
    [record] = objects_folder.glob("adapters/*/*/versions/*")
    content = record.read_bytes()
    record.write_bytes(content[: len(content) // 2])
    _age(objects_folder, MIN_AGE_S + 60)
    with pytest.raises(DataLoss, match=str(record.relative_to(objects_folder))):
        await Collector(registry.store).collect()
    assert await registry.store.head(layout.blob("a" * 64)) is not None
