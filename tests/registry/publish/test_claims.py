"""How the content of an upload gets its version."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loraplex_services.registry import layout
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.publish.uploads import Options
from loraplex_services.registry.records import VersionRecord
from tests.registry.house import adapter_files, declared, orphans, publish


async def test_a_number_that_was_taken_is_noticed_while_the_bytes_are_still_stored(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(registry, "sql", 1)
    put = registry.store.put_if_absent

    async def outdated(scope: str, digest: str) -> tuple[int, int, list[VersionRecord]]:
        return 0, 0, []

    async def slow(key: str, *args: Any, **options: Any) -> str:
        await asyncio.sleep(0.3 if key.startswith(layout.BLOBS) else 0.1)
        return await put(key, *args, **options)

    monkeypatch.setattr(registry.catalog, "before_new", outdated)
    monkeypatch.setattr(registry.store, "put_if_absent", slow)
    files = adapter_files(2)
    options = Options("default", "sql", ("latest",))
    session = registry.uploads.in_one_call(options, declared(files), "tester", 16 * "0")
    done = await registry.publisher.publish(session, files)
    assert (done.version.version, done.created) == (2, True)
    assert await orphans(registry) == set()
