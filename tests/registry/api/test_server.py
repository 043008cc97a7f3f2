"""The gRPC API, through the SDK: statuses, paging, and who may do what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.api.format_wire import geometry_to_proto
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import (
    AlreadyExists,
    Blocked,
    Conflict,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
)
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.registry import layout
from loraplex_services.registry.access import keys as keys_module
from loraplex_services.registry.access.auth import KeyAuth
from loraplex_services.registry.api import server
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index.redis_calls import CatalogDown
from tests.adapter_format.builders import tiny_geometry
from tests.registry.conftest import ServedRegistry
from tests.registry.house import upload

SERVICE_TOKEN = "a-token-that-services-share"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PublishOptions(name="s q l"), "options.name"),
        (pb.PublishOptions(name="sql", tags=["v3"]), "options.tags"),
        (pb.PublishOptions(name="sql", labels={"": "x"}), "options.labels[]"),
        (pb.PublishOptions(name="sql", labels={str(n): "" for n in range(65)}), "options.labels"),
        (
            pb.PublishOptions(name="sql", labels={str(n): 256 * "€" for n in range(64)}),
            "options.labels",
        ),
        (
            pb.PublishOptions(name="sql", labels={"rope_scaling": "linear:4"}),
            "options.labels[rope_scaling]",
        ),
        (pb.PublishOptions(name="sql", parent="a:b:c"), "options.parent"),
    ],
)
async def test_bad_options_name_their_field(
    served: ServedRegistry, request_: pb.PublishOptions, field: str
) -> None:
    request = pb.CreateUploadRequest(options=request_)
    with pytest.raises(InvalidRequest) as refused:
        await served.client._channel.call(served.client._stub.CreateUpload, request)
    assert refused.value.violations[0].field == field


async def test_a_visibility_of_a_later_version_is_refused_and_stored_nowhere(
    served: ServedRegistry, tmp_path: Path
) -> None:
    await upload(served.client, tmp_path, "sql", 1)
    later: Any = 9
    options = pb.PublishOptions(name="sql", visibility=later)
    channel, stub = served.client._channel, served.client._stub
    with pytest.raises(Unsupported, match=r"options\.visibility: is a visibility that"):
        await channel.call(stub.CreateUpload, pb.CreateUploadRequest(options=options))
    with pytest.raises(Unsupported, match="visibility: is a visibility that"):
        await channel.call(stub.SetSharing, pb.SetSharingRequest(name="sql", visibility=later))
    assert [version.visibility async for version in served.client.list()] == ["private"]


async def test_a_download_names_the_file_that_a_version_lacks(
    served: ServedRegistry, tmp_path: Path
) -> None:
    await upload(served.client, tmp_path, "sql", 1)
    call = served.client._stub.DownloadAdapter(
        pb.DownloadAdapterRequest(ref="sql", paths=["README.md"])
    )
    with pytest.raises(grpc.RpcError, match="paths: is not a file of this version"):
        await call.read()


@pytest.mark.parametrize("index", ["there", "lost"])
async def test_a_list_shows_what_a_bare_name_means(
    served: ServedRegistry, tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listed() -> list[int]:
        return [version.version async for version in served.client.list()]

    for seed in (1, 2, 3):
        await upload(served.client, tmp_path, "sql", seed)
    await served.client.set_tag("sql", "latest", {1: 1})
    if index == "lost":
        monkeypatch.setattr(served.registry.catalog, "page", _raise_down)
    assert await listed() == [1]
    await served.client.set_tag("sql", "latest", {1: 10, 2: 90})
    assert await listed() == [2]
    await served.client.delete_tag("sql", "latest")
    assert await listed() == [3], "the newest where nothing is latest"


async def test_the_history_of_a_tag_tells_its_moves_newest_first(
    served: ServedRegistry, tmp_path: Path
) -> None:
    for seed in (1, 2):
        await upload(served.client, tmp_path, "sql", seed, tags=["prod"])
    await served.client.set_tag("sql", "prod", {1: 90, 2: 10})
    await served.client.rollback("sql", "prod", 1)
    await served.client.delete_tag("sql", "prod")
    moves = await served.client.tag_history("sql", "prod")
    assert [{target.version: target.weight for target in move.targets} for move in moves] == [
        {}, {1: 1}, {1: 90, 2: 10}, {2: 1}, {1: 1},
    ]  # fmt: skip
    assert [move.generation for move in moves] == [5, 4, 3, 2, 1]
    assert sorted((move.moved_unix_s for move in moves), reverse=True) == [
        move.moved_unix_s for move in moves
    ]
    with pytest.raises(NotFound, match="staging"):
        await served.client.tag_history("sql", "staging")


async def _raise_down(*args: object, **options: object) -> None:
    raise CatalogDown("away")


@pytest.mark.parametrize("index", ["there", "lost"])
async def test_lists_filter_by_label_prefix_name_and_base(
    served: ServedRegistry, tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("chat", "SQL-a", "sql-b")):
        await upload(served.client, tmp_path, name, seed, labels={"seed": str(seed)})

    async def names(**query: object) -> list[str]:
        return [version.name async for version in served.client.list(**query)]  # type: ignore[arg-type]

    if index == "lost":
        monkeypatch.setattr(served.registry.catalog, "page", _raise_down)
    assert await names() == ["chat", "SQL-a", "sql-b"]
    assert await names(name_prefix="sql") == ["SQL-a", "sql-b"]
    assert await names(name="sql-a") == ["SQL-a"]
    assert await names(labels={"seed": "2"}) == ["sql-b"]
    assert await names(base_id="no-such") == []


async def test_errors_of_tags_and_deletion_keep_their_types(
    served: ServedRegistry, tmp_path: Path
) -> None:
    await upload(served.client, tmp_path, "sql", 1, tags=["prod"])
    with pytest.raises(Conflict):
        await served.client.set_tag("sql", "prod", {1: 1}, expect="none")
    with pytest.raises(InvalidRequest, match=r"expect: .*'none' or a digest"):
        await served.client.set_tag("sql", "prod", {1: 1}, expect="v1")
    with pytest.raises(NotFound):
        await served.client.set_tag("sql", "prod", {9: 1})
    delete = served.client._stub.DeleteAdapterVersion
    with pytest.raises(Blocked):
        await served.client._channel.call(delete, pb.DeleteAdapterVersionRequest(ref="sql:v1"))
    with pytest.raises(InvalidRequest, match="sql:v1"):
        await served.client._channel.call(delete, pb.DeleteAdapterVersionRequest(ref="sql"))
    with pytest.raises(NotFound):
        await served.client.get("sql:v2")


async def test_a_base_with_another_geometry_needs_replace(served: ServedRegistry) -> None:
    geometry = geometry_to_proto(tiny_geometry())
    geometry.fingerprint = "sha256:" + "1" * 64
    base = pb.Base(base_id="example/tiny", geometry=geometry)
    call, stub = served.client._channel.call, served.client._stub
    with pytest.raises(AlreadyExists):
        await call(stub.RegisterBase, pb.RegisterBaseRequest(base=base))
    await call(stub.RegisterBase, pb.RegisterBaseRequest(base=base, replace=True))
    listed = await stub.ListBases(pb.ListBasesRequest())
    assert [b.geometry.fingerprint for b in listed.bases] == [geometry.fingerprint]


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
        published = await upload(publisher, tmp_path, "sql", 1)
        assert published.version.tenant == "acme"
        assert (await reader.get("sql")).version.creator != ""
        with pytest.raises(PermissionDenied, match="publisher"):
            await reader.set_tag("sql", "prod", {1: 1})
        with pytest.raises(NotFound):
            await stranger.get("acme/sql")
        with pytest.raises(NotFound):
            await stranger.set_tag("acme/sql", "prod", {1: 1})
        with pytest.raises(PermissionDenied, match="cannot publish for 'acme'"):
            await upload(stranger, tmp_path, "acme/mine", 2)
        assert [v async for v in stranger.list()] == []
        with pytest.raises(PermissionDenied):
            await reader._channel.call(reader._stub.Reindex, pb.ReindexRequest())
        await upload(publisher, tmp_path, "sql", 1, public=True)
        assert (await stranger.get("acme/sql")).version.version == 1
        assert [v.name async for v in stranger.list()] == ["sql"]


async def test_running_and_pulling_are_shared_separately(
    guarded: tuple[Registry, str], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        owner = await _client(stack, guarded, "acme", "publisher")
        friend = await _client(stack, guarded, "friend", "publisher")
        stranger = await _client(stack, guarded, "other", "reader")
        await upload(owner, tmp_path, "sql", 1)
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


async def test_what_is_said_of_an_adapter_may_be_changed_and_its_versions_may_not(
    guarded: tuple[Registry, str], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        owner = await _client(stack, guarded, "acme", "publisher")
        reader = await _client(stack, guarded, "acme", "reader")
        stranger = await _client(stack, guarded, "other", "publisher")
        await upload(owner, tmp_path, "sql", 1)
        before = (await reader.get("sql")).version
        said = await owner.describe("sql", "Writes SQL", set_labels={"team": "data", "stage": "x"})
        assert (said.description, said.labels) == ("Writes SQL", {"stage": "x", "team": "data"})
        said = await owner.describe("sql", set_labels={"team": "db"}, remove_labels=["stage", "no"])
        assert (said.description, said.labels) == ("Writes SQL", {"team": "db"})
        after = (await reader.get("sql")).version
        assert (after.description, after.adapter_labels) == ("Writes SQL", {"team": "db"})
        assert (after.labels, after.digest) == (before.labels, before.digest)
        async for change in reader.watch():
            if change.version is not None:
                assert change.version.adapter_labels == {"team": "db"}, "watchers learn of it"
                break
        await upload(owner, tmp_path, "sql", 2)
        assert [v.version async for v in reader.list(labels={"team": "db"})] == [2]
        assert [v.version async for v in reader.list(labels={"team": "data"})] == []
        assert (await owner.describe("sql", "")).description == ""
        with pytest.raises(PermissionDenied):
            await reader.describe("sql", "mine")
        with pytest.raises(NotFound):
            await stranger.describe("acme/sql", "mine")
        with pytest.raises(NotFound):
            await owner.describe("nothing", "x")
        for fields, field in (
            ({"description": "x" * 257}, "description"),
            ({"set_labels": {"k" * 64: ""}}, "set_labels"),
            ({"set_labels": {f"k{number}": "" for number in range(64)}}, "set_labels"),
            ({"set_labels": {"rope_scaling": "{}"}}, "set_labels"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await owner.describe("sql", **fields)
            assert caught.value.violations[0].field.startswith(field)


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


async def test_services_ask_by_id_whether_a_key_is_still_valid(
    guarded: tuple[Registry, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, address = guarded
    monkeypatch.setattr(keys_module, "CACHE_S", 0.0)
    record, token = await registry.keys.create("acme", ["reader"], 0.0, "")
    request = pb.CheckKeyRequest(key_id=record.key_id)
    async with RegistryClient(address, Credentials(api_key=SERVICE_TOKEN)) as service:
        answer = await service._channel.call(service._stub.CheckKey, request)
        assert (answer.key.tenant, list(answer.key.scopes)) == ("acme", ["reader"])
        # A bad token is not saved by a good id.
        both = pb.CheckKeyRequest(key_id=record.key_id, token=token[:-1] + "!")
        await registry.keys.revoke(record.key_id)
        for refused in (request, both, pb.CheckKeyRequest(key_id="../tenants/acme")):
            with pytest.raises(Unauthenticated):
                await service._channel.call(service._stub.CheckKey, refused)
    async with RegistryClient(address, Credentials(api_key=token)) as reader:
        with pytest.raises((PermissionDenied, Unauthenticated)):
            await reader._channel.call(reader._stub.CheckKey, request)


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
        await upload(publisher, tmp_path, "sql", 1)
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


async def test_many_readers_at_once_get_the_same_answer(
    served: ServedRegistry, tmp_path: Path
) -> None:
    published = await upload(served.client, tmp_path, "sql", 1)
    found = await asyncio.gather(*(served.client.get("sql") for _ in range(50)))
    assert {answer.version.digest for answer in found} == {published.version.digest}
