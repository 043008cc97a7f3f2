"""A dry run is refused whenever the upload would be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import (
    AdapterNotFound,
    AlreadyExists,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.registry import layout
from loraplex_services.registry.access.auth import KeyAuth
from loraplex_services.registry.api import server
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.records import TenantRecord
from tests.registry.house import BASE_ID, adapter_files, declared, tiny_base, write_folder


@pytest.fixture
async def address(registry: Registry) -> AsyncIterator[str]:
    """The registry, served to holders of keys."""
    auth = KeyAuth(registry.keys, "")
    running = await grpc_server.start([server.service(registry)], ["127.0.0.1:0"], auth=auth)
    yield f"127.0.0.1:{running.port}"
    await running.stop(0)


@asynccontextmanager
async def client(registry: Registry, address: str, scope: str) -> AsyncIterator[RegistryClient]:
    _, token = await registry.keys.create("acme", [scope], 0.0, "")
    async with RegistryClient(address, Credentials(api_key=token)) as made:
        yield made


async def test_a_dry_run_is_refused_as_the_upload_would_be(
    registry: Registry, address: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "adapter", adapter_files(1))
    await registry.bases.register(tiny_base("taken"), replace=False)
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(client(registry, address, "publisher"))
        reader = await stack.enter_async_context(client(registry, address, "reader"))
        checked = await publisher.check(folder, Publication("sql", base_id=BASE_ID))
        assert checked.base_id == BASE_ID
        with pytest.raises(PermissionDenied, match="scope 'publisher'"):
            await reader.check(folder, Publication("sql"))
        with pytest.raises(PermissionDenied, match="cannot publish for 'other'"):
            await publisher.check(folder, Publication("other/sql"))
        with pytest.raises(AlreadyExists, match="the id of a base"):
            await publisher.check(folder, Publication("taken"))
        with pytest.raises(NotFound, match=r"options.parent: no adapter 'acme/absent'") as error:
            await publisher.check(folder, Publication("sql", parent="absent:v1"))
        assert error.value.reason == AdapterNotFound.reason
        await registry.tenants.set(TenantRecord("acme", max_bytes=100))
        with pytest.raises(ResourceExhausted):
            await publisher.check(folder, Publication("sql", base_id=BASE_ID))
    assert [info async for info in registry.store.list_objects(layout.ADAPTERS)] == []


async def test_an_upload_that_goes_on_has_room_for_itself(
    registry: Registry, address: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "adapter", adapter_files(1))
    specs = [
        pb.FileSpec(path=file.path, size=file.size, sha256=file.sha256)
        for file in declared(adapter_files(1))
    ]
    size = sum(spec.size for spec in specs)
    await registry.tenants.set(TenantRecord("acme", max_bytes=size))
    async with client(registry, address, "publisher") as publisher:
        publication = Publication("sql", base_id=BASE_ID)
        request = pb.CreateUploadRequest(options=publication.to_proto(), files=specs)
        await publisher._channel.call(publisher._stub.CreateUpload, request)
        await publisher.check(folder, publication)
        with pytest.raises(ResourceExhausted, match="of unfinished uploads"):
            await publisher.check(folder, Publication("other", base_id=BASE_ID))
