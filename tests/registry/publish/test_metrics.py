"""What a registry reports to Prometheus of uploads, watches and its index."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import REGISTRY

from loraplex.client import uploading
from loraplex.errors import NotFound
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.redis_calls import CatalogDown
from tests.registry.conftest import ServedRegistry
from tests.registry.house import upload


def _value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"loraplex_registry_{name}", labels) or 0.0


async def test_uploads_are_counted_by_how_they_ended(
    served: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = ("created", "unchanged", "adapter_not_found")
    before = {outcome: _value("uploads_total", outcome=outcome) for outcome in outcomes}
    received = _value("received_bytes_total")
    await upload(served.client, tmp_path, "sql", 1)
    stored = _value("received_bytes_total") - received
    assert stored >= sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(uploading, "MAX_ONE_CALL_BYTES", -1)
    await upload(served.client, tmp_path, "sql", 1)
    with pytest.raises(NotFound):
        await upload(served.client, tmp_path, "sql", 2, parent="nowhere:v1")
    assert {
        outcome: _value("uploads_total", outcome=outcome) - count
        for outcome, count in before.items()
    } == dict.fromkeys(outcomes, 1)
    assert _value("received_bytes_total") - received == stored, "parts that it has are not sent"


async def test_watches_are_counted_while_they_are_open(served: ServedRegistry) -> None:
    await _until_no_watchers()  # those of servers that earlier tests have stopped
    changes: Any = served.client.watch()
    await anext(changes)
    assert _value("watchers") == 1
    await changes.aclose()
    await _until_no_watchers()


async def _until_no_watchers() -> None:
    """A server notices only after its client that a watch has ended."""
    async with asyncio.timeout(60):
        while _value("watchers") > 0:
            await asyncio.sleep(0.01)


async def test_a_change_that_never_reached_the_index_shows_as_lag(registry: Registry) -> None:
    await registry.catalog.note_pending("default/sql")
    await asyncio.sleep(0.01)
    await registry.indexer.repair(60.0)
    assert 0.01 <= _value("index_lag_seconds") < 60
    rebuilds = _value("index_rebuilds_total")
    await registry.indexer.rebuild()
    assert _value("index_rebuilds_total") == rebuilds + 1


async def test_an_index_that_cannot_be_checked_shows_as_lag(
    registry: Registry, metadata_url: str
) -> None:
    server = redis.Redis.from_url(metadata_url)
    server.config_set("maxmemory", "1gb")
    server.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(CatalogDown):
            await registry.indexer.start()
        assert _value("index_lag_seconds") > 0
    finally:
        server.config_set("maxmemory-policy", "noeviction")
        server.config_set("maxmemory", 0)
    await registry.indexer.start()
    assert _value("index_lag_seconds") == 0


async def test_the_memory_of_the_metadata_server_is_reported_with_its_limit(
    registry: Registry, metadata_url: str
) -> None:
    server = redis.Redis.from_url(metadata_url)
    limit = server.config_get("maxmemory")["maxmemory"]
    server.config_set("maxmemory", "1gb")
    try:
        await registry.indexer.measure()
    finally:
        server.config_set("maxmemory", limit)
    assert _value("metadata_max_bytes") == 1 << 30
    assert 0 < _value("metadata_bytes") < 1 << 30
