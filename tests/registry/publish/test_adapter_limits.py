"""An adapter has a limited number of versions and tags, because some calls read all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from loraplex.errors import NotFound, ResourceExhausted
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish import claims, tags
from loraplex_services.registry.publish.uploads import Finished
from tests.registry.conftest import ServedRegistry
from tests.registry.house import publish, upload

pytestmark = pytest.mark.hostile


async def _live(registry: Registry) -> list[int]:
    found = await registry.catalog.find("default/sql", "all")
    return [version.version for version in found.versions if not version.deleted]


async def test_a_version_beyond_the_limit_is_refused_until_another_one_is_deleted(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_VERSIONS_PER_ADAPTER", 2)
    for seed in (1, 2):
        await publish(registry, "sql", seed)
    why = r"default/sql has 2 versions, .* at most 2; delete some with 'registry delete'"
    with pytest.raises(ResourceExhausted, match=why) as refused:
        await publish(registry, "sql", 3)
    assert refused.value.reason == "TOO_MANY_VERSIONS"
    assert [violation.field for violation in refused.value.violations] == ["name"]
    assert not (await publish(registry, "sql", 1)).created, "the content has a version"
    assert (await publish(registry, "other", 3)).created
    await registry.deletion.version("default", "sql", 1, "tester", force=True, purge=False)
    assert (await publish(registry, "sql", 3)).version.version == 3


async def test_publications_at_the_same_time_do_not_exceed_the_limit_together(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_VERSIONS_PER_ADAPTER", 3)
    await publish(registry, "sql", 0)
    publications = (publish(registry, "sql", seed) for seed in range(1, 7))
    ended = await asyncio.gather(*publications, return_exceptions=True)
    assert sum(isinstance(each, Finished) for each in ended) == 2
    assert sum(isinstance(each, ResourceExhausted) for each in ended) == 4
    assert await _live(registry) == [1, 2, 3]


async def test_a_trainer_whose_older_updates_are_deleted_publishes_any_number(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MAX_VERSIONS_PER_ADAPTER", 3)
    for seed in range(8):
        await publish(registry, "sql", seed, keep_versions=2)
        await registry.retention.retire("default", "sql", 2)
    assert await _live(registry) == [7, 8]


async def _is_refused(call: Awaitable[Any]) -> bool:
    try:
        await call
    except ResourceExhausted as error:
        assert error.reason == "TOO_MANY_TAGS"
        assert "default/sql has 3 tags" in error.message and "at most 3" in error.message
        return True
    return False


async def test_every_call_that_would_add_a_tag_beyond_the_limit_is_refused(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tags, "MAX_TAGS_PER_ADAPTER", 3)
    client, outcome = served.client, {"outcome": "too_many_tags"}
    await upload(client, tmp_path, "sql", 1, tags=["a", "b"])
    before = REGISTRY.get_sample_value("loraplex_registry_uploads_total", outcome) or 0
    assert await _is_refused(upload(client, tmp_path, "sql", 2, tags=["a", "c"]))
    counted = REGISTRY.get_sample_value("loraplex_registry_uploads_total", outcome) or 0
    assert counted == before + 1
    with pytest.raises(NotFound):
        await client.get("sql:v2")
    assert await _is_refused(client.set_tag("sql", "c", {1: 1}))
    assert await _is_refused(client.set_tag("sql", "c", {1: 1}, when_loaded_s=60))
    assert await _is_refused(client.rollback("sql", "c", 1))
    await client.delete_tag("sql", "a")
    assert await _is_refused(client.set_tag("sql", "c", {1: 1})), "its history is kept"
    assert not await _is_refused(client.set_tag("sql", "a", {1: 1}))
    assert not await _is_refused(upload(client, tmp_path, "sql", 2, tags=["a", "b"]))


async def test_latest_is_allowed_beside_as_many_tags_as_an_adapter_may_have(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tags, "MAX_TAGS_PER_ADAPTER", 2)
    await publish(registry, "sql", 1, "a", "b", latest=False)
    await publish(registry, "sql", 2)
    found = await registry.catalog.find("default/sql", "all")
    assert [tag.tag for tag in found.tags] == ["a", "b", "latest"]
