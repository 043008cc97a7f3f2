"""What a dead registry left half done is brought to its end by the next one, as it was meant."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from loraplex.api.registry import TagTarget
from loraplex.refs import parse_ref
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry import layout
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.assembly import Registry, assemble
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.publish import failpoint
from loraplex_services.registry.publish.tags import TagAddress
from loraplex_services.registry.records import PUBLIC, AdapterRecord, TagRecord
from tests.registry.house import adapter_files, opened, publish
from tests.s3_servers import proven_store

ROOT = Access("default", "", frozenset({"root", "admin"}))
PROD = TagAddress("default", "sql", "prod")


class Died(BaseException):
    """The process is gone; nothing below catches this."""


@pytest.fixture
async def successor(
    registry: Registry, objects_url: str, metadata_url: str
) -> AsyncIterator[Registry]:
    """Another registry on the same store and index."""
    catalog = Catalog(connect_redis(metadata_url))
    yield assemble(await proven_store(objects_url), catalog)
    await catalog.close()


@pytest.fixture
def die_at(monkeypatch: pytest.MonkeyPatch) -> object:
    """Arm a failpoint that ends the work at hand instead of this process."""

    def exit_(status: int) -> None:
        failpoint._armed.clear()
        raise Died

    monkeypatch.setattr(os, "_exit", exit_)
    monkeypatch.setattr(failpoint, "_armed", {})
    return failpoint.arm


async def _tag(registry: Registry, tag: str) -> TagRecord:
    record = await registry.tags.read(TagAddress("default", "sql", tag))
    assert record is not None
    return record


@pytest.mark.parametrize("step", ["publish.version", "publish.visibility", "publish.tag"])
async def test_a_staged_upload_whose_registry_died_is_staged_by_the_next(
    registry: Registry, successor: Registry, die_at: object, step: str
) -> None:
    await publish(registry, "sql", 1, "prod")
    files = adapter_files(2)
    session = await opened(registry, "sql", files, "prod", when_loaded_s=60.0)
    assert callable(die_at)
    die_at(step)
    with pytest.raises(Died):
        await registry.publisher.finish(session)
    assert await successor.indexer.recover() == 1
    for tag in ("latest", "prod"):
        record = await _tag(successor, tag)
        assert [target.version for target in record.targets] == [1]
        assert [target.version for target in record.pending] == [2]
    assert (await successor.lookup.resolve(parse_ref("sql"), ROOT)).version.version == 1
    assert await successor.indexer.recover() == 0
    record = await _tag(successor, "prod")
    await successor.staging.finish(PROD, record.generation, "", "gateway")
    assert (await successor.lookup.resolve(parse_ref("sql:prod"), ROOT)).version.version == 2


async def test_a_publication_that_cannot_be_completed_keeps_no_registry_from_starting(
    registry: Registry, successor: Registry, die_at: object
) -> None:
    lost = await opened(registry, "sql", adapter_files(1))
    kept = await opened(registry, "sql", adapter_files(2))
    assert callable(die_at)
    for session in (lost, kept):
        die_at("publish.version")
        with pytest.raises(Died):
            await registry.publisher.finish(session)
    await registry.store.delete(layout.upload_session(lost.upload_id))
    await successor.indexer.start()
    assert await successor.uploads.finished(kept.upload_id) is not None
    assert await successor.uploads.finished(lost.upload_id) is None


async def test_a_stage_that_somebody_overruled_meanwhile_is_not_brought_back(
    registry: Registry, successor: Registry, die_at: object
) -> None:
    for seed in (1, 2):
        await publish(registry, "sql", seed, "prod")
    session = await opened(registry, "sql", adapter_files(3), "prod", when_loaded_s=60.0)
    assert callable(die_at)
    die_at("publish.version")
    with pytest.raises(Died):
        await registry.publisher.finish(session)
    await successor.tags.set(PROD, [TagTarget(1, "")], None, "somebody")
    await successor.indexer.recover()
    record = await _tag(successor, "prod")
    assert [target.version for target in record.targets] == [1]
    assert record.pending == ()


async def test_an_acknowledgement_read_by_another_registry_is_the_one_that_was_given(
    registry: Registry, successor: Registry
) -> None:
    session = await opened(registry, "sql", adapter_files(1), visibility=PUBLIC)
    given = await registry.publisher.finish(session)
    assert isinstance(given.adapter, AdapterRecord)
    assert await successor.uploads.finished(session.upload_id) == given
    assert await successor.publisher.finish(session) == given
