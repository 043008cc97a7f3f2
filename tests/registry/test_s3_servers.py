"""A registry process alongside real S3 servers: those it may publish to, and those it must not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex_services.common.objects import open_store
from loraplex_services.common.objects.probe import probe
from loraplex_services.registry.maintenance.gc import Collector
from loraplex_services.registry.maintenance.snapshots import Snapshots
from tests.registry.house import ANY_AGE_S, orphans_of, register_base, upload
from tests.registry.process import RegistryProcess
from tests.s3_servers import need_real_server, new_bucket

pytestmark = [pytest.mark.s3, pytest.mark.e2e]

IGNORES_CONDITIONS = os.environ.get("S3_SERVER") == "s3rver"
CHECKS_SIGNATURES = os.environ.get("S3_SERVER") == "ceph"


@pytest.fixture
def objects_url() -> str:
    need_real_server()
    return f"s3://{new_bucket()}/house"


@pytest.fixture
async def process(tmp_path: Path, objects_url: str) -> AsyncIterator[RegistryProcess]:
    registry = RegistryProcess(tmp_path / "state", LORAPLEX_OBJECTS=objects_url)
    yield registry
    await registry.kill()


@pytest.mark.skipif(not IGNORES_CONDITIONS, reason="needs scripts/s3_server.sh s3rver")
async def test_registry_refuses_a_server_that_ignores_conditional_writes(
    process: RegistryProcess,
) -> None:
    await process.start(wait=False)
    assert await process.wait() == 1
    assert "unsafe to publish to" in process.log()
    assert "create-only" in process.log()


@pytest.mark.skipif(IGNORES_CONDITIONS, reason="that server is refused")
async def test_registry_starts_and_damaged_uploads_are_refused(process: RegistryProcess) -> None:
    await process.start()
    store = open_store(f"s3://{new_bucket()}")
    await probe(store)
    assert await store.find_upload_check("x")  # type: ignore[attr-defined]
    assert not store._compare_md5, "the server itself checks"  # type: ignore[attr-defined]


async def _read_all(client: RegistryClient, folder: Path) -> set[str]:
    """The versions that are listed, each pulled whole."""
    listed = [version.ref async for version in client.list(all_versions=True)]
    for ref in listed:
        await client.pull(ref, folder / ref.replace("/", "-"))
    return set(listed)


@pytest.mark.skipif(IGNORES_CONDITIONS, reason="that server is refused")
async def test_killed_amid_uploads_it_serves_all_that_was_acknowledged_from_a_new_index(
    process: RegistryProcess, objects_url: str, tmp_path: Path
) -> None:
    """Its metadata server dies with it: a snapshot, newer objects and a collection follow."""
    store = open_store(objects_url)
    await process.start()
    async with RegistryClient(process.address, Credentials()) as client:
        await register_base(client)
        early = [await upload(client, tmp_path, "sql", seed) for seed in range(3)]
        await client.delete("sql:v1", purge=True)
        await Snapshots(store).write()
        late = [
            asyncio.create_task(upload(client, tmp_path, f"late-{seed}", seed))
            for seed in range(3, 9)
        ]
        await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        await process.kill()
        answers = await asyncio.gather(*late, return_exceptions=True)
    done = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert done and len(done) < len(late), "some were acknowledged, and some were not"
    acknowledged = {published.version.ref for published in (*early[1:], *done)}
    await process.start()
    async with RegistryClient(process.address, Credentials()) as client:
        found = await _read_all(client, tmp_path / "before")
        assert acknowledged <= found and early[0].version.ref not in found
        await Collector(store, min_age_s=ANY_AGE_S, session_max_age_s=ANY_AGE_S).collect()
        assert await orphans_of(store) == set()
        assert await _read_all(client, tmp_path / "after") == found
    await store.close()


@pytest.mark.skipif(not CHECKS_SIGNATURES, reason="needs scripts/s3_server.sh ceph")
async def test_wrong_secret_is_reported_and_nothing_is_ready(
    process: RegistryProcess,
) -> None:
    await process.start(wait=False, AWS_SECRET_ACCESS_KEY="wrong")
    while "SignatureDoesNotMatch" not in process.log():
        assert process.process is not None and process.process.returncode is None, process.log()
    assert not await process.is_ready()
