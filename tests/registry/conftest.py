"""One metadata server for all tests of the registry, emptied before each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.registry.api import server
from loraplex_services.registry.assembly import Registry
from tests.registry.house import house_of
from tests.s3_servers import FILE_AND_S3, objects_url_of, proven_store
from tests.servers import running_metadata


@pytest.fixture(scope="session")
def metadata_server() -> Iterator[str]:
    with running_metadata() as (url, _):
        yield url


@pytest.fixture
def metadata_url(metadata_server: str) -> str:
    client = redis.Redis.from_url(metadata_server)
    client.flushall()
    client.close()
    return metadata_server


@pytest.fixture(params=FILE_AND_S3)
def objects_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty object store."""
    return objects_url_of(request.param, tmp_path)


@pytest.fixture
def objects_folder(objects_url: str) -> Path:
    """The folder of the store, for tests `only_files` that age or damage what lies in it."""
    assert objects_url.startswith("file:"), "mark the test with only_files"
    return Path(objects_url.removeprefix("file://"))


@pytest.fixture
async def registry(objects_url: str, metadata_url: str) -> AsyncIterator[Registry]:
    """A registry that knows one base."""
    store = await proven_store(objects_url)
    async with house_of(store, metadata_url) as assembled:
        yield assembled
    await store.close()


@dataclass(frozen=True, slots=True)
class ServedRegistry:
    """A served registry and a client of it."""

    registry: Registry
    client: RegistryClient
    address: str


@pytest.fixture
async def served(registry: Registry) -> AsyncIterator[ServedRegistry]:
    running = await grpc_server.start([server.service(registry)], ["127.0.0.1:0"])
    await running.set_ready(True)
    address = f"127.0.0.1:{running.port}"
    async with RegistryClient(address, Credentials()) as client:
        yield ServedRegistry(registry, client, address)
    await running.stop(0)
