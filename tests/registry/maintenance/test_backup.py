"""A restored backup lists and holds what the registry did, whatever was published meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from loraplex.errors import AlreadyExists, InvalidRequest
from loraplex.refs import parse_ref
from loraplex_services.common.objects import ObjectStore, open_store
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.maintenance import backup
from loraplex_services.registry.maintenance.backup import copy_registry
from tests.registry.house import house_of, publish
from tests.s3_servers import objects_url_of, only_files, proven_store

PROD = parse_ref("default/name-1:prod")
ROOT = Access("default", "", frozenset({"root"}))


@pytest.fixture
async def registry(registry: Registry) -> Registry:
    """One that has started, as far as its store shows."""
    await layout.check_layout_number(registry.store, layout.LAYOUT_KEY, layout.LAYOUT_NUMBER)
    return registry


@pytest.fixture
async def copy(objects_url: str, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    opened = open_store(empty_store(objects_url, tmp_path / "copy"))
    yield opened
    await opened.close()


def empty_store(objects_url: str, folder: Path) -> str:
    """A store of the same kind as the registry's."""
    return objects_url_of(objects_url.partition(":")[0], folder)


async def _keys(store: ObjectStore, prefix: str) -> list[str]:
    return [info.key async for info in store.list_objects(prefix)]


async def _documents(store: ObjectStore, prefix: str) -> dict[str, dict[str, Any]]:
    keys = await _keys(store, prefix)
    found = zip(keys, await store.get_many(keys), strict=True)
    return {key: json.loads(data) for key, data in found if data is not None}


async def _dangling(store: ObjectStore) -> list[str]:
    """Tags without their version, and versions without their files."""
    documents = await _documents(store, layout.ADAPTERS)
    blobs = {key.rpartition("/")[2] for key in await _keys(store, layout.BLOBS)}
    wrong = []
    for key, document in documents.items():
        folder = key.partition("/tags/")[0]
        for target in document.get("targets", ()) if "/tags/" in key else ():
            if f"{folder}/versions/{target['version']:010d}.json" not in documents:
                wrong.append(key)
        if "/versions/" in key and not {file["sha256"] for file in document["files"]} <= blobs:
            wrong.append(key)
    return wrong


async def test_a_restored_backup_answers_like_the_registry(
    registry: Registry, objects_url: str, metadata_url: str, copy: ObjectStore, tmp_path: Path
) -> None:
    for seed in range(4):
        await publish(registry, f"default/name-{seed % 2}", seed, "prod")
    expected = await registry.lookup.resolve(PROD, ROOT)
    await copy_registry(registry.store, copy)
    target_url = empty_store(objects_url, tmp_path / "restored")
    target = open_store(target_url)
    result = await copy_registry(copy, target)
    assert result.num_blobs == len(await _keys(registry.store, layout.BLOBS))
    for prefix in (layout.ADAPTERS, layout.BASES, layout.AUDIT, layout.LAYOUT_KEY):
        assert await _documents(target, prefix) == await _documents(registry.store, prefix)
    assert await target.head(backup.MARKER) is None
    assert await _keys(target, layout.BLOBS) == await _keys(registry.store, layout.BLOBS)
    await target.close()
    redis.Redis.from_url(metadata_url).flushall()
    target = await proven_store(target_url)
    async with house_of(target, metadata_url) as restored:
        assert await restored.lookup.resolve(PROD, ROOT) == expected
        assert (await publish(restored, "default/name-1", 9)).version.version == 3
    await target.close()


async def test_a_copy_made_while_versions_are_published_names_nothing_that_it_lacks(
    registry: Registry, copy: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is published, and a tag moved to it, before each page is read."""
    monkeypatch.setattr(backup, "PAGE", 2)
    seeds = itertools.count()
    get_many, publishing = registry.store.get_many, asyncio.Lock()

    async def publish_and_read(keys: Sequence[str]) -> list[bytes | None]:
        if not publishing.locked():
            async with publishing:
                await publish(registry, "default/name-1", next(seeds), "prod")
        return await get_many(keys)

    await publish(registry, "default/name-1", next(seeds), "prod")
    monkeypatch.setattr(registry.store, "get_many", publish_and_read)
    for _ in range(2):
        await copy_registry(registry.store, copy)
        assert await _dangling(copy) == []
    assert next(seeds) > 10


async def test_a_second_backup_writes_only_what_changed(
    registry: Registry, copy: ObjectStore
) -> None:
    await publish(registry, "default/a", 1, "prod")
    await copy_registry(registry.store, copy)
    unchanged = await copy_registry(registry.store, copy)
    assert (unchanged.num_written, unchanged.num_blobs) == (0, 0)
    await publish(registry, "default/a", 2, "prod")
    changed = await copy_registry(registry.store, copy)
    assert 0 < changed.num_written < changed.num_documents
    # The weights and the manifest; both versions have the same config.
    assert changed.num_blobs == 2


@only_files
async def test_a_damaged_blob_is_named_and_the_copy_cannot_be_restored(
    registry: Registry, objects_folder: Path, copy: ObjectStore, tmp_path: Path
) -> None:
    await publish(registry, "default/a", 1)
    [key, *_] = await _keys(registry.store, layout.BLOBS)
    blob = objects_folder / key
    blob.write_bytes(bytes(blob.stat().st_size))
    result = await copy_registry(registry.store, copy)
    assert result.damaged == [key] and await copy.head(key) is None
    with pytest.raises(InvalidRequest, match="unfinished"):
        await copy_registry(copy, open_store(f"file://{tmp_path}/restored"))


@pytest.mark.parametrize("marker", [b"", b"{}", b"[1]", b'{"complete": tru'])
async def test_a_copy_with_a_damaged_marker_cannot_be_restored(
    registry: Registry, copy: ObjectStore, tmp_path: Path, marker: bytes
) -> None:
    await publish(registry, "default/a", 1)
    await copy_registry(registry.store, copy)
    await copy.put(backup.MARKER, marker)
    with pytest.raises(InvalidRequest, match="repeat the backup"):
        await copy_registry(copy, open_store(f"file://{tmp_path}/restored"))


@pytest.mark.hostile
async def test_a_store_in_use_is_never_overwritten(registry: Registry, copy: ObjectStore) -> None:
    await publish(registry, "default/a", 1)
    await copy_registry(registry.store, copy)
    with pytest.raises(AlreadyExists, match="name an empty store"):
        await copy_registry(copy, registry.store)


def test_the_command_copies_and_its_errors_name_the_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = f"file://{tmp_path}/source", f"file://{tmp_path}/target"
    assert backup.main([source, target]) == 2
    assert f"FROM: {source} holds no" in capsys.readouterr().err
    (tmp_path / "source/loraplex.json").write_text('{"layout": 1}')
    assert backup.main([source, target]) == 0
    assert "1 document read, 1 written" in capsys.readouterr().out
