"""A tenant's ephemeral versions stay within `LORAPLEX_EPHEMERAL_BYTES`."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry.api.usage import used_adapters
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish import retention
from loraplex_services.registry.publish.retention import Retention
from loraplex_services.registry.records import VersionRecord
from tests.registry.house import publish
from tests.s3_servers import only_files


async def _ephemeral(registry: Registry, *numbers: int) -> list[VersionRecord]:
    done = [await publish(registry, f"doc-{n}", n, ttl_s=600.0) for n in numbers]
    return [finished.version for finished in done]


async def _live(registry: Registry) -> list[str]:
    versions = await registry.catalog.ephemeral_versions("default")
    return sorted(version.name for version in versions)


def _bounded(registry: Registry, num_bytes: float) -> Retention:
    return Retention(registry.catalog, registry.deletion, int(num_bytes))


async def test_those_used_least_recently_are_deleted_first(registry: Registry) -> None:
    [version, *_] = await _ephemeral(registry, 1, 2, 3, 4, 5)
    lasting = (await publish(registry, "sql", 6)).version
    bounded = _bounded(registry, 3.5 * version.size_bytes)
    await bounded.used(["default/doc-2", "default/sql"])
    await bounded.trim("default")
    assert await _live(registry) == ["doc-2", "doc-4", "doc-5"]
    assert bounded.num_retired == 2
    found = await registry.catalog.find("default/sql", "live")
    assert [v.version for v in found.versions] == [lasting.version]


async def test_within_the_limit_nothing_is_deleted(registry: Registry) -> None:
    [version, *_] = await _ephemeral(registry, 1, 2, 3)
    await _bounded(registry, 4 * version.size_bytes).trim("default")
    assert await _live(registry) == ["doc-1", "doc-2", "doc-3"]


async def test_only_uses_of_adapters_with_an_ephemeral_version_are_kept(
    registry: Registry,
) -> None:
    """There may be an adapter for each request."""
    [version, *_] = await _ephemeral(registry, 1, 2)
    bounded = _bounded(registry, 4 * version.size_bytes)
    await bounded.used(["default/doc-1", "default/ended", "default/lasting", "other/ended"])
    await bounded.trim("default")
    uses = registry.catalog.recent_uses
    assert (await uses.of_tenant("default")).keys() == {"default/doc-1"}
    assert (await uses.of_tenant("other")).keys() == {"other/ended"}


async def test_the_one_used_last_stays_however_large_it_is(registry: Registry) -> None:
    await _ephemeral(registry, 1, 2)
    bounded = _bounded(registry, 1)
    await bounded.used(["default/doc-1"])
    await bounded.trim("default")
    assert await _live(registry) == ["doc-1"]


async def test_a_publication_makes_room(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "RETIRE_PAUSE_S", 0.01)
    versions = await _ephemeral(registry, 1, 2, 3)
    bounded = _bounded(registry, 2.5 * versions[0].size_bytes)
    task = asyncio.create_task(bounded.run())
    bounded.published(versions[-1])
    while await _live(registry) != ["doc-2", "doc-3"]:
        await asyncio.sleep(0.01)
    bounded.published((await _ephemeral(registry, 4))[0])
    while await _live(registry) != ["doc-3", "doc-4"]:
        await asyncio.sleep(0.01)
    task.cancel()


@only_files
async def test_room_that_could_not_be_made_is_made_after_the_next_publication(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(retention, "RETIRE_PAUSE_S", 0.01)
    [version, *_] = versions = await _ephemeral(registry, *range(12))
    bounded = _bounded(registry, 11 * version.size_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        bounded.published(versions[-1])
        task = asyncio.create_task(bounded.run())
        while "versions not retired" not in caplog.text:
            await asyncio.sleep(0.01)
    assert len(await _live(registry)) == 12
    bounded.published(versions[-1])  # alone, it adds less than a tenth of the limit
    while len(await _live(registry)) != 9:
        await asyncio.sleep(0.01)
    task.cancel()


async def test_without_a_limit_nothing_is_noted(registry: Registry) -> None:
    [version, *_] = await _ephemeral(registry, 1)
    registry.retention.published(version)
    await registry.retention.used(["default/doc-1"])
    assert await registry.catalog.recent_uses.of_tenant("default") == {}


def test_a_report_names_the_adapters_that_their_own_tenant_used() -> None:
    models = ["acme/a", "acme/b+acme/c", "other/d", "org-base", "acme-2/e"]
    entries = [pb.UsageEntry(day="2026-11-26", tenant="acme", model=model) for model in models]
    names = ["acme/once", "acme/Spelled-1"]
    request = pb.RecordUsageRequest(report_id="r", entries=entries, ephemeral_adapters=names)
    used = {"acme/a", "acme/b", "acme/c", "acme/once", "acme/spelled-1"}
    assert used_adapters(request) == used, "as the index has them"
