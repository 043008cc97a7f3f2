"""A disk that is full at any step of publishing: reported, nothing lost, nothing half done."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from loraplex.refs import parse_ref
from loraplex_services.common.objects import ObjectStoreError
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api.downloads import chunks_of
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.maintenance.gc import Collector
from tests.registry.house import ANY_AGE_S, adapter_files, opened, orphans, publish
from tests.s3_servers import only_files

ROOT = Access("default", "", frozenset({"root", "admin"}))


class Disk:
    """Takes that many syncs, then is full until it is told otherwise."""

    def __init__(self) -> None:
        self.left = 0
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        """In the place of `os.fsync`."""
        if self.left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1
        self._fsync(descriptor)


async def _versions(registry: Registry) -> list[int]:
    """Those that can be read whole."""
    found = await registry.catalog.find("default/sql", "all")
    for version in found.versions:
        read = sum([len(chunk.data) async for chunk in chunks_of(registry.store, version)])
        assert read == version.size_bytes
    return [version.version for version in found.versions]


@only_files
async def test_publishing_on_a_disk_that_fills_at_any_step_fails_whole_and_works_again(
    registry: Registry, objects_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(registry, "sql", 0)
    disk, refused = Disk(), 0
    for room in itertools.count():
        files = adapter_files(1 + room)
        before = await _versions(registry)
        with monkeypatch.context() as patch:
            disk.left = room
            patch.setattr(os, "fsync", disk.fsync)
            try:
                session = await opened(registry, "sql", files)
                await registry.publisher.finish(session)
                break
            except ObjectStoreError as error:
                assert "No space left on device" in error.message
                refused += 1
            await registry.indexer.repair(0.0)
            now = await _versions(registry)
            assert now in (before, [*before, len(before) + 1]), "a full disk keeps what it has"
        await registry.indexer.repair(0.0)
        session = await opened(registry, "sql", files)
        done = await registry.publisher.finish(session)
        assert done.version.version == len(before) + 1
        latest = (await registry.lookup.resolve(parse_ref("sql"), ROOT)).version
        assert latest.version == len(before) + 1
    assert refused > 10, "every sync of an upload"
    collector = Collector(registry.store, min_age_s=ANY_AGE_S, session_max_age_s=ANY_AGE_S)
    await collector.collect()
    assert await orphans(registry) == set()
    assert await _versions(registry) == list(range(1, room + 3))
