"""The gRPC door, through the SDK: statuses, paging, transfers, and who may do what."""

from __future__ import annotations

import asyncio
import hashlib
import random
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis.asyncio

from loraplex.convert import geometry_to_proto
from loraplex.errors import (
    AlreadyExists,
    Blocked,
    Conflict,
    DataLoss,
    InvalidAdapter,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from loraplex.publishing import Publication
from loraplex.registry_client import RegistryClient
from loraplex.settings import Credentials
from loraplex.v1 import registry_pb2 as pb
from services.common import grpc_server
from services.registry import keys as keys_module
from services.registry import layout, server
from services.registry.assembly import Registry
from services.registry.auth import KeyAuth
from tests.adapter_format.builders import tiny_geometry
from tests.registry.conftest import Door
from tests.registry.house import CONFIG, TENSORS, adapter_files, write_folder

SERVICE_TOKEN = "a-token-that-services-share"


async def _upload(client: RegistryClient, tmp_path: Path, name: str, seed: int, **options: object):
    folder = write_folder(tmp_path / f"adapter-{seed}", adapter_files(seed))
    return await client.upload(folder, Publication(name, **options))  # type: ignore[arg-type]


async def test_what_is_pulled_is_what_was_uploaded(door: Door, tmp_path: Path) -> None:
    published = await _upload(door.client, tmp_path, "sql", 1, labels={"team": "data"})
    pulled = await door.client.pull("sql", tmp_path / "pulled")
    assert pulled.digest == published.version.digest
    for path, data in adapter_files(1).items():
        assert (tmp_path / "pulled" / path).read_bytes() == data


async def test_an_interrupted_upload_continues_where_it_stopped(door: Door, tmp_path: Path) -> None:
    files = adapter_files(1)
    folder = write_folder(tmp_path / "adapter", files)
    stub = door.client._stub
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path in sorted(files):
        size, sha256 = len(files[path]), _sha256(files[path])
        request.files.add(path=path, size=size, sha256=sha256)
    session = await stub.CreateUpload(request)
    part = _part(session.upload_id, TENSORS, 0, files[TENSORS][:1000])
    answer = await stub.UploadPart(iter([part]))
    assert answer.progress.committed_bytes == 1000
    again = await stub.CreateUpload(request)
    assert again.upload_id == session.upload_id
    state = await stub.GetUpload(pb.GetUploadRequest(upload_id=session.upload_id))
    assert {p.path: p.committed_bytes for p in state.progress} == {CONFIG: 0, TENSORS: 1000}
    assert (await door.client.upload(folder, Publication("sql"))).version.version == 1
    state = await stub.GetUpload(pb.GetUploadRequest(upload_id=session.upload_id))
    assert state.finished.version == 1


async def test_an_upload_ends_though_the_index_is_lost_between_its_first_and_last_call(
    door: Door, tmp_path: Path, metadata_url: str
) -> None:
    await _upload(door.client, tmp_path, "sql", 1)
    files = adapter_files(2)
    assert files[CONFIG] == adapter_files(1)[CONFIG]
    stub = door.client._stub
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path, data in files.items():
        request.files.add(path=path, size=len(data), sha256=_sha256(data))
    session = await stub.CreateUpload(request)
    assert {p.path for p in session.progress if p.complete} == {CONFIG}
    await stub.UploadPart(iter([_part(session.upload_id, TENSORS, 0, files[TENSORS])]))
    raw = redis.asyncio.Redis.from_url(metadata_url)
    await raw.flushall()
    await raw.aclose()
    # The index is back, but empty: it cannot say any more what the tenant had.
    epoch = await door.registry.catalog.begin_rebuild()
    assert epoch is not None
    assert await door.registry.catalog.switch(epoch) is True
    done = await stub.FinishUpload(pb.FinishUploadRequest(upload_id=session.upload_id))
    assert done.version.version == 2


async def test_a_chunk_that_was_damaged_on_the_way_is_not_stored(door: Door) -> None:
    files = adapter_files(1)
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path, data in files.items():
        request.files.add(path=path, size=len(data), sha256=_sha256(data))
    session = await door.client._stub.CreateUpload(request)
    part = _part(session.upload_id, CONFIG, 0, files[CONFIG])
    part.crc32 ^= 1
    with pytest.raises(DataLoss, match="crc32"):
        await door.client._channel.call(door.client._stub.UploadPart, iter([part]))


@pytest.mark.parametrize("chunk_bytes", [1 << 19, 1 << 20])
async def test_chunks_before_a_damaged_one_are_kept(door: Door, chunk_bytes: int) -> None:
    data = random.Random(1).randbytes(5 * chunk_bytes)
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    request.files.add(path=CONFIG, size=2, sha256=_sha256(b"{}"))
    request.files.add(path=TENSORS, size=len(data), sha256=_sha256(data))
    stub = door.client._stub
    session = await stub.CreateUpload(request)
    parts = [
        _part(session.upload_id, TENSORS, begin, data[begin : begin + chunk_bytes])
        for begin in range(0, len(data), chunk_bytes)
    ]
    parts[3].crc32 ^= 1
    with pytest.raises(DataLoss, match="crc32"):
        await door.client._channel.call(stub.UploadPart, iter(parts))
    state = await stub.GetUpload(pb.GetUploadRequest(upload_id=session.upload_id))
    assert {p.path: p.committed_bytes for p in state.progress}[TENSORS] == 3 * chunk_bytes
    parts[3].crc32 ^= 1
    answer = await stub.UploadPart(iter(parts[3:]))
    assert answer.progress.complete


@pytest.mark.parametrize(
    ("files", "field"),
    [
        ({"adapter_model.bin": b"x"}, "adapter_model.bin"),
        ({"../escape": b"x"}, "../escape"),
        ({"checkpoint.zip": b"x"}, "checkpoint.zip"),
        ({}, TENSORS),
    ],
)
async def test_odd_files_are_refused_before_a_byte_is_sent(
    door: Door, files: dict[str, bytes], field: str
) -> None:
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path, data in {CONFIG: b"{}", **files}.items():
        request.files.add(path=path, size=len(data), sha256=_sha256(data))
    with pytest.raises(InvalidAdapter) as refused:
        await door.client._channel.call(door.client._stub.CreateUpload, request)
    assert field in {violation.field for violation in refused.value.violations}
    assert [i async for i in door.registry.store.list_objects(layout.UPLOADS)] == []


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PublishOptions(name="SQL"), "options.name"),
        (pb.PublishOptions(name="sql", tags=["v3"]), "options.tags"),
        (pb.PublishOptions(name="sql", labels={"": "x"}), "options.labels[]"),
        (pb.PublishOptions(name="sql", labels={str(n): "" for n in range(65)}), "options.labels"),
        (
            pb.PublishOptions(name="sql", labels={"rope_scaling": "linear:4"}),
            "options.labels[rope_scaling]",
        ),
        (pb.PublishOptions(name="sql", parent="a:b:c"), "options.parent"),
    ],
)
async def test_bad_options_name_their_field(
    door: Door, request_: pb.PublishOptions, field: str
) -> None:
    request = pb.CreateUploadRequest(options=request_)
    with pytest.raises(InvalidRequest) as refused:
        await door.client._channel.call(door.client._stub.CreateUpload, request)
    assert refused.value.violations[0].field == field


async def test_lists_filter_by_label_prefix_name_and_base(door: Door, tmp_path: Path) -> None:
    for seed, name in enumerate(("chat", "sql-a", "sql-b")):
        await _upload(door.client, tmp_path, name, seed, labels={"seed": str(seed)})

    async def names(**query: object) -> list[str]:
        return [version.name async for version in door.client.list(**query)]  # type: ignore[arg-type]

    assert await names() == ["chat", "sql-a", "sql-b"]
    assert await names(name_prefix="sql") == ["sql-a", "sql-b"]
    assert await names(name="sql-a") == ["sql-a"]
    assert await names(labels={"seed": "2"}) == ["sql-b"]
    assert await names(base_id="no-such") == []


async def test_pages_follow_each_other_without_gap_or_double(door: Door, tmp_path: Path) -> None:
    for seed in range(5):
        await _upload(door.client, tmp_path, f"a{seed % 2}", seed)
    seen: list[tuple[str, int]] = []
    request = pb.ListAdaptersRequest(page_size=2, all_versions=True)
    while True:
        page = await door.client._stub.ListAdapters(request)
        seen += [(version.name, version.version) for version in page.versions]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert seen == [("a0", 1), ("a0", 2), ("a0", 3), ("a1", 1), ("a1", 2)]
    with pytest.raises(InvalidRequest, match="token"):
        request.page_token = "nonsense"
        await door.client._channel.call(door.client._stub.ListAdapters, request)


async def test_errors_of_tags_and_deletion_keep_their_types(door: Door, tmp_path: Path) -> None:
    await _upload(door.client, tmp_path, "sql", 1, tags=["prod"])
    with pytest.raises(Conflict):
        await door.client.set_tag("sql", "prod", {1: 1}, expect="none")
    with pytest.raises(NotFound):
        await door.client.set_tag("sql", "prod", {9: 1})
    delete = door.client._stub.DeleteAdapterVersion
    with pytest.raises(Blocked):
        await door.client._channel.call(delete, pb.DeleteAdapterVersionRequest(ref="sql:v1"))
    with pytest.raises(InvalidRequest, match="sql:v1"):
        await door.client._channel.call(delete, pb.DeleteAdapterVersionRequest(ref="sql"))
    with pytest.raises(NotFound):
        await door.client.get("sql:v2")


async def test_a_base_with_another_geometry_needs_replace(door: Door) -> None:
    geometry = geometry_to_proto(tiny_geometry())
    geometry.fingerprint = "sha256:" + "1" * 64
    base = pb.Base(base_id="example/tiny", geometry=geometry)
    call, stub = door.client._channel.call, door.client._stub
    with pytest.raises(AlreadyExists):
        await call(stub.RegisterBase, pb.RegisterBaseRequest(base=base))
    await call(stub.RegisterBase, pb.RegisterBaseRequest(base=base, replace=True))
    listed = await stub.ListBases(pb.ListBasesRequest())
    assert [b.geometry.fingerprint for b in listed.bases] == [geometry.fingerprint]


async def test_damaged_bytes_in_the_store_are_data_loss_not_data(
    door: Door, objects_folder: Path, tmp_path: Path
) -> None:
    published = await _upload(door.client, tmp_path, "sql", 1)
    tensors = next(file for file in published.version.files if file.path == TENSORS)
    path = objects_folder / layout.blob(tensors.sha256)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataLoss):
        await door.client.pull("sql", tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    path.write_bytes(data[:-1])
    with pytest.raises(DataLoss, match="damaged in the store"):
        await door.client.pull("sql", tmp_path / "pulled")
    path.unlink()
    with pytest.raises(DataLoss, match="gone from the store"):
        await door.client.pull("sql", tmp_path / "pulled")
    config = next(file for file in published.version.files if file.path == CONFIG)
    (objects_folder / layout.blob(config.sha256)).write_bytes(b" " * config.size_bytes)
    with pytest.raises(DataLoss, match="not what was published"):
        await door.client.read_file("sql", CONFIG)


@pytest.fixture
async def guarded(registry: Registry) -> AsyncIterator[tuple[Registry, str]]:
    auth = KeyAuth(registry.keys, SERVICE_TOKEN)
    running = await grpc_server.start([server.service(registry)], ["127.0.0.1:0"], auth=auth)
    yield registry, f"127.0.0.1:{running.port}"
    await running.stop(0)


async def _client(
    stack: AsyncExitStack, guarded: tuple[Registry, str], tenant: str, *scopes: str
) -> RegistryClient:
    _, token = await guarded[0].keys.create(tenant, scopes, 0.0, "")
    return await stack.enter_async_context(RegistryClient(guarded[1], Credentials(api_key=token)))


async def test_keys_bound_what_their_holders_see_and_do(
    guarded: tuple[Registry, str], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        publisher = await _client(stack, guarded, "acme", "publisher")
        reader = await _client(stack, guarded, "acme", "reader")
        stranger = await _client(stack, guarded, "other", "admin")
        published = await _upload(publisher, tmp_path, "sql", 1)
        assert published.version.tenant == "acme"
        assert (await reader.get("sql")).version.creator != ""
        with pytest.raises(PermissionDenied, match="publisher"):
            await reader.set_tag("sql", "prod", {1: 1})
        with pytest.raises(NotFound):
            await stranger.get("acme/sql")
        with pytest.raises(NotFound):
            await stranger.set_tag("acme/sql", "prod", {1: 1})
        with pytest.raises(PermissionDenied, match="cannot publish for 'acme'"):
            await _upload(stranger, tmp_path, "acme/mine", 2)
        assert [v async for v in stranger.list()] == []
        with pytest.raises(PermissionDenied):
            await reader._channel.call(reader._stub.Reindex, pb.ReindexRequest())
        await _upload(publisher, tmp_path, "sql", 1, public=True)
        assert (await stranger.get("acme/sql")).version.version == 1
        assert [v.name async for v in stranger.list()] == ["sql"]


async def test_running_and_pulling_are_shared_separately(
    guarded: tuple[Registry, str], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        owner = await _client(stack, guarded, "acme", "publisher")
        friend = await _client(stack, guarded, "friend", "publisher")
        stranger = await _client(stack, guarded, "other", "reader")
        await _upload(owner, tmp_path, "sql", 1)
        request = pb.SetSharingRequest(
            name="sql", visibility=pb.VISIBILITY_SHARED, shared_with=["friend"]
        )
        answer = await owner._channel.call(owner._stub.SetSharing, request)
        assert list(answer.shared_with) == ["friend"] and not answer.pullable
        assert (await friend.get("acme/sql")).version.version == 1
        with pytest.raises(NotFound):
            await stranger.get("acme/sql")
        with pytest.raises(PermissionDenied, match="download"):
            await friend.pull("acme/sql", tmp_path / "pulled")
        request = pb.SetSharingRequest(name="sql", pullable=True)
        await owner._channel.call(owner._stub.SetSharing, request)
        assert (await friend.pull("acme/sql", tmp_path / "pulled")).version == 1
        with pytest.raises(NotFound):
            await friend._channel.call(
                friend._stub.SetSharing, pb.SetSharingRequest(name="acme/sql", pullable=True)
            )


async def test_gateways_may_ask_who_holds_a_key(guarded: tuple[Registry, str]) -> None:
    registry, address = guarded
    record, token = await registry.keys.create("acme", ["reader"], 0.0, "")
    async with RegistryClient(address, Credentials(api_key=SERVICE_TOKEN)) as gateway:
        request = pb.CheckKeyRequest(token=token)
        answer = await gateway._channel.call(gateway._stub.CheckKey, request)
        assert (answer.key.key_id, answer.key.tenant) == (record.key_id, "acme")
        with pytest.raises(Unauthenticated):
            request = pb.CheckKeyRequest(token=token[:-1] + "!")
            await gateway._channel.call(gateway._stub.CheckKey, request)
    async with RegistryClient(address, Credentials(api_key=token)) as reader:
        with pytest.raises(PermissionDenied):
            await reader._channel.call(reader._stub.CheckKey, pb.CheckKeyRequest(token=token))


async def test_calls_without_a_good_key_are_unauthenticated(
    guarded: tuple[Registry, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, address = guarded
    monkeypatch.setattr(keys_module, "CACHE_S", 0.0)
    expired, expired_token = await registry.keys.create("acme", ["reader"], 1e-9, "")
    revoked, revoked_token = await registry.keys.create("acme", ["reader"], 0.0, "")
    await registry.keys.revoke(revoked.key_id)
    forged = f"lpx_{expired.key_id}_{'0' * 48}"
    for token in ("", "nonsense", forged, expired_token, revoked_token):
        async with RegistryClient(address, Credentials(api_key=token)) as client:
            with pytest.raises(Unauthenticated):
                await client.get("sql")


async def test_the_service_token_reads_for_everybody_and_registers_bases(
    guarded: tuple[Registry, str], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        publisher = await _client(stack, guarded, "acme", "publisher")
        await _upload(publisher, tmp_path, "sql", 1)
        gateway = await stack.enter_async_context(
            RegistryClient(guarded[1], Credentials(api_key=SERVICE_TOKEN))
        )
        assert (await gateway.get("acme/sql")).version.version == 1
        base = pb.Base(base_id="more", geometry=geometry_to_proto(tiny_geometry()))
        await gateway._stub.RegisterBase(
            pb.RegisterBaseRequest(base=base),
            metadata=(("authorization", f"Bearer {SERVICE_TOKEN}"),),
        )
        with pytest.raises(PermissionDenied):
            await gateway.set_tag("acme/sql", "prod", {1: 1})
        request = pb.RegisterBaseRequest(base=base)
        with pytest.raises(PermissionDenied):
            await publisher._channel.call(publisher._stub.RegisterBase, request)


async def test_the_secret_of_a_key_is_nowhere_in_the_store(registry: Registry) -> None:
    record, token = await registry.keys.create("acme", ["reader"], 0.0, "laptop")
    secret = token.rpartition("_")[2]
    stored = (await registry.store.get(layout.key(record.key_id))).data
    assert secret.encode() not in stored
    assert (await registry.keys.check(token)).tenant == "acme"


async def test_many_readers_at_once_get_the_same_answer(door: Door, tmp_path: Path) -> None:
    published = await _upload(door.client, tmp_path, "sql", 1)
    found = await asyncio.gather(*(door.client.get("sql") for _ in range(50)))
    assert {answer.version.digest for answer in found} == {published.version.digest}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _part(upload_id: str, path: str, offset: int, data: bytes) -> pb.UploadPartRequest:
    return pb.UploadPartRequest(
        upload_id=upload_id, path=path, offset=offset, data=data, crc32=zlib.crc32(data)
    )
