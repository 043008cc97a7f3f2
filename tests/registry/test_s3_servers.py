"""A registry process beside real S3 servers: those it may publish to, and those it must not."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.objects import open_store
from services.common.objects.probe import probe
from tests.registry.process import RegistryProcess
from tests.s3_servers import need_real_server, new_bucket

pytestmark = [pytest.mark.s3, pytest.mark.e2e]

IGNORES_CONDITIONS = os.environ.get("S3_SERVER") == "s3rver"
CHECKS_SIGNATURES = os.environ.get("S3_SERVER") == "ceph"


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[RegistryProcess]:
    need_real_server()
    url = f"s3://{new_bucket()}/house"
    registry = RegistryProcess(tmp_path / "state", LORAPLEX_OBJECTS=url)
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


@pytest.mark.skipif(not CHECKS_SIGNATURES, reason="needs scripts/s3_server.sh ceph")
async def test_wrong_secret_is_told_and_nothing_is_ready(
    process: RegistryProcess,
) -> None:
    await process.start(wait=False, AWS_SECRET_ACCESS_KEY="wrong")
    while "SignatureDoesNotMatch" not in process.log():
        assert process.process is not None and process.process.returncode is None, process.log()
    assert not await process.is_ready()
