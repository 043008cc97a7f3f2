"""Deleting an adapter with many versions and tags reads its versions once, not for each tag."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.api.registry import TagTarget
from loraplex_services.registry import layout
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish.tags import TagAddress
from tests.registry.house import publish

pytestmark = pytest.mark.hostile


def _count_reads_of_versions(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every read of all versions of the adapter `sql`."""
    folder, read, reads = layout.versions_folder("default", "sql"), registry.store.get_folder, []

    async def counted(prefix: str) -> Any:
        if prefix == folder:
            reads.append(1)
        return await read(prefix)

    monkeypatch.setattr(registry.store, "get_folder", counted)
    return reads


async def test_the_versions_of_a_deleted_adapter_are_read_once_for_all_its_tags(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        await publish(registry, "sql", seed, *(f"tag-{seed}-{number}" for number in range(5)))
    reads = _count_reads_of_versions(registry, monkeypatch)
    await registry.deletion.adapter("default", "sql", "me", purge=False)
    found = await registry.catalog.find("default/sql", "all")
    assert not found.tags
    assert len(reads) == 1


async def test_a_tag_that_moves_to_a_new_version_during_a_deletion_stays_there(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(registry, "sql", 1, "prod")
    await publish(registry, "sql", 2, "test")
    prod = TagAddress("default", "sql", "prod")
    move, is_first = registry.tags.move, True

    async def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            await publish(registry, "sql", 3)
            await registry.tags.set(prod, [TagTarget(3, "")], None, "other")
        return await move(*args, **options)

    monkeypatch.setattr(type(registry.tags), "move", lambda _, *a, **o: interrupted(*a, **o))
    await registry.deletion.version("default", "sql", 1, "me", force=True, purge=False)
    record = await registry.tags.read(prod)
    assert record is not None and [target.version for target in record.targets] == [3]


async def test_latest_falls_back_past_a_version_that_is_deleted_at_the_same_time(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2, 3):
        await publish(registry, "sql", seed)
    move, is_first = registry.tags.move, True

    async def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            await registry.deletion.version("default", "sql", 2, "other", force=True, purge=False)
        return await move(*args, **options)

    monkeypatch.setattr(type(registry.tags), "move", lambda _, *a, **o: interrupted(*a, **o))
    await registry.deletion.version("default", "sql", 3, "me", force=True, purge=False)
    record = await registry.tags.read(TagAddress("default", "sql", "latest"))
    assert record is not None and [target.version for target in record.targets] == [1]
