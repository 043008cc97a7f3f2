"""What a tenant's admin sends cannot break the administration of keys and tenants for others."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from loraplex.api.error_wire import from_rpc_error
from loraplex.client import registry_client
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import DataLoss, InvalidRequest, LoraplexError, NotFound
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from loraplex_services.common.documents import encode
from loraplex_services.common.grpc import call_rates
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.limits import MAX_DESCRIPTION_CHARS, MAX_UPLOAD_STREAMS
from loraplex_services.registry import layout
from loraplex_services.registry.access import keys
from loraplex_services.registry.access.auth import KeyAuth
from loraplex_services.registry.api import publish_options, publishing, server
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.index import open_uploads
from loraplex_services.registry.records import TenantRecord
from tests.registry.house import adapter_files, opened, publish

pytestmark = pytest.mark.hostile

NOT_LIFETIMES = [float("nan"), float("inf"), float("-inf"), -1.0, 1e300]


@pytest.fixture
async def address(registry: Registry) -> AsyncIterator[str]:
    auth = KeyAuth(registry.keys, "service-token-of-16")
    running = await grpc_server.start([server.service(registry)], ["127.0.0.1:0"], auth=auth)
    yield f"127.0.0.1:{running.port}"
    await running.stop(0)


@pytest.mark.parametrize("ttl_s", NOT_LIFETIMES)
async def test_lifetime_that_is_not_finite_is_refused_and_keys_stay_listed(
    registry: Registry, address: str, ttl_s: float
) -> None:
    _, token = await registry.keys.create("globex", ["admin"], 0.0, "")
    async with RegistryClient(address, Credentials(api_key=token)) as admin:
        with pytest.raises(InvalidRequest):
            await admin.admin.create_key("globex", ["reader"], ttl_s=ttl_s)
        assert len(await admin.admin.keys()) == 1


async def test_long_description_of_a_key_is_refused(registry: Registry) -> None:
    with pytest.raises(InvalidRequest, match="description"):
        await registry.keys.create("globex", ["reader"], 0.0, "x" * (MAX_DESCRIPTION_CHARS + 1))


async def test_damaged_key_hides_no_other_and_its_revocation_names_the_document(
    registry: Registry,
) -> None:
    good, _ = await registry.keys.create("acme", ["reader"], 0.0, "")
    bad, _ = await registry.keys.create("globex", ["reader"], 60.0, "")
    key = layout.key(bad.key_id)
    stored = await registry.store.get(key)
    damaged = json.dumps({**json.loads(stored.data), "expires_s": None}).encode()
    await registry.store.put_if_match(key, damaged, stored.etag)
    records, _ = await registry.keys.page("", 1000)
    assert [record.key_id for record in records] == [good.key_id]
    with pytest.raises(DataLoss, match=key):
        await registry.keys.revoke(bad.key_id)


async def test_keys_of_other_tenants_are_revoked_as_if_there_were_none(
    registry: Registry, address: str
) -> None:
    theirs, _ = await registry.keys.create("acme", ["reader"], 0.0, "")
    mine, token = await registry.keys.create("globex", ["admin"], 0.0, "")
    unknown = theirs.key_id[::-1]
    async with RegistryClient(address, Credentials(api_key=token)) as admin:
        told = []
        for key_id in (theirs.key_id, unknown):
            with pytest.raises(NotFound) as refused:
                await admin.admin.revoke_key(key_id)
            [violation] = refused.value.violations
            assert (violation.field, violation.value) == ("key_id", key_id)
            told.append(violation.description)
        await admin.admin.revoke_key(mine.key_id)
    assert told[0] == told[1] and "acme" not in told[0]
    assert not (await registry.keys.get(theirs.key_id)).revoked_s
    assert (await registry.keys.get(mine.key_id)).revoked_s


async def test_uploads_of_other_tenants_are_answered_as_if_there_were_none(
    registry: Registry, address: str
) -> None:
    theirs, mine = [
        (await registry.keys.create(tenant, ["admin"], 0.0, ""))[1] for tenant in ("acme", "globex")
    ]
    request = pb.CreateUploadRequest(options=pb.PublishOptions(name="sql"))
    for path, data in adapter_files(1).items():
        request.files.add(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = registry_pb2_grpc.RegistryServiceStub(channel)
        as_owner = [("authorization", f"Bearer {theirs}")]
        known = (await stub.CreateUpload(request, metadata=as_owner)).upload_id
        unknown = known[:-16] + known[:-17:-1]

        async def told(method: Any, message: Any) -> str:
            with pytest.raises(grpc.RpcError) as refused:
                await method(message, metadata=[("authorization", f"Bearer {mine}")])
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
            return str(refused.value.details()).replace(known, "").replace(unknown, "")

        for name in ("GetUpload", "FinishUpload"):
            kind, method = getattr(pb, f"{name}Request"), getattr(stub, name)
            assert len({await told(method, kind(upload_id=each)) for each in (known, unknown)}) == 1
        parts = [iter([pb.UploadPartRequest(upload_id=each)]) for each in (known, unknown)]
        assert len({await told(stub.UploadPart, part) for part in parts}) == 1


@pytest.mark.parametrize(
    "field", ["tokens_per_s", "requests_per_s", "fairness_weight", "max_concurrent"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
async def test_tenants_numbers_are_finite_and_in_range(
    registry: Registry, field: str, value: float
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        await registry.tenants.set(TenantRecord("acme", **{field: value}))  # type: ignore[arg-type]
    assert await registry.tenants.all() == []


def test_record_with_a_number_that_json_lacks_is_not_stored() -> None:
    with pytest.raises(ValueError, match="nan"):
        encode(TenantRecord("acme", tokens_per_s=float("nan")))


@pytest.mark.parametrize(
    "text",
    [
        "null",
        '["a", 1e999]',
        '["a", -1]',
        '["a", 99999999999999999999]',
        '["a", "1"]',
        "[" * 50_000,
    ],
)
async def test_page_token_of_another_shape_is_an_invalid_request(
    registry: Registry, text: str
) -> None:
    service = server.RegistryService(registry)
    token = base64.urlsafe_b64encode(text.encode()).decode()
    with pytest.raises(InvalidRequest, match="page_token"):
        await service.ListAdapters(pb.ListAdaptersRequest(page_token=token), None)


async def test_more_keys_than_fit_a_message_are_listed_in_pages(
    registry: Registry, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_BATCH_KEYS", 4)
    made = {"acme": set[str](), "globex": set[str]()}
    for number in range(21):
        tenant = "acme" if number % 3 else "globex"
        record, token = await registry.keys.create(tenant, ["admin"], 0.0, "")
        made[tenant].add(record.key_id)
    for tenant, ids in made.items():
        for page_size in (1, 5, 7, 14, 100):
            found, after = [], ""
            while True:
                records, after = await registry.keys.page(tenant, page_size, after)
                assert len(records) <= page_size
                found += [record.key_id for record in records]
                if not after:
                    break
            assert found == sorted(ids)
    async with RegistryClient(address, Credentials(api_key=token)) as admin:
        assert len(await admin.admin.keys()) == len(made["acme"])
        with pytest.raises(InvalidRequest, match="page_token"):
            call = pb.ListKeysRequest(page_token="../x")
            await admin.admin._channel.call(admin.admin._stub.ListKeys, call)


async def test_upload_streams_of_one_tenant_leave_others_their_own_and_idle_ones_end(
    registry: Registry, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [(await registry.keys.create(t, ["admin"], 0.0, ""))[1] for t in ("globex", "acme")]
    part = pb.UploadPartRequest(upload_id="01ARZ3NDEKTSV4RRFFQ69G5FAV")
    idle = asyncio.Event()
    monkeypatch.setattr(publishing, "MAX_UPLOAD_IDLE_S", 600.0)

    async def nothing() -> AsyncIterator[pb.UploadPartRequest]:
        await idle.wait()
        yield part

    async with grpc.aio.insecure_channel(address) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)

        def upload(token: str, parts: Any) -> Any:
            return stub.UploadPart(parts, metadata=[("authorization", f"Bearer {token}")])

        held = [upload(tokens[0], nothing()) for _ in range(2 * MAX_UPLOAD_STREAMS)]
        async with asyncio.timeout(30):
            for _ in range(5):
                code = await upload(tokens[1], iter([part])).code()
                assert code == grpc.StatusCode.NOT_FOUND, "it was read: there is no such upload"
        for call in held:
            call.cancel()
        monkeypatch.setattr(publishing, "MAX_UPLOAD_IDLE_S", 0.5)
        assert await upload(tokens[0], nothing()).code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_an_upload_that_moves_thousands_of_tags_is_refused() -> None:
    options = pb.PublishOptions(name="a", tags=[f"t{number}" for number in range(20_000)])
    with pytest.raises(InvalidRequest, match=f"at most {publish_options.MAX_TAGS} tags"):
        publish_options.options_from_proto(options, "globex")


@pytest.fixture
async def begin(registry: Registry, address: str) -> AsyncIterator[Any]:
    """Begins an upload of 400 bytes with this name; returns the reason of a refusal, or ""."""
    _, token = await registry.keys.create("globex", ["publisher"], 0.0, "")
    sizes = {"adapter_config.json": 100, "adapter_model.safetensors": 300}
    files = [pb.FileSpec(path=path, size=n, sha256=f"{n:064}") for path, n in sizes.items()]
    async with grpc.aio.insecure_channel(address) as channel:
        create = registry_pb2_grpc.RegistryServiceStub(channel).CreateUpload

        async def begun(name: str) -> str:
            request = pb.CreateUploadRequest(options=pb.PublishOptions(name=name), files=files)
            try:
                await create(request, metadata=[("authorization", f"Bearer {token}")])
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error).reason
            return ""

        yield begun


async def test_unfinished_uploads_count_in_the_quota_until_they_end(
    registry: Registry, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.tenants.set(TenantRecord("globex", max_bytes=1000))
    assert [await begin(name) for name in ("a", "b", "a", "b")] == [""] * 4
    assert await begin("c") == "QUOTA_BYTES"
    monkeypatch.setattr(open_uploads, "MAX_AGE_S", -1.0)  # those of before have ended
    assert await begin("c") == ""


async def test_a_published_or_refused_upload_counts_as_unfinished_no_longer(
    registry: Registry,
) -> None:
    uploads = registry.catalog.open_uploads
    files = adapter_files(1)
    good = await opened(registry, "sql", files)
    bad = await opened(registry, "bad", {**files, "adapter_config.json": b"{}"})
    limits = await registry.tenants.get("default")
    for session in (good, bad):
        await registry.tenants.begin_upload(limits, session.fingerprint, 400)
    assert await uploads.num_bytes("default") == 800
    await registry.publisher.finish(good)
    with pytest.raises(LoraplexError):
        await registry.publisher.finish(bad)
    assert await uploads.num_bytes("default") == 0


async def test_a_tenant_has_a_limited_number_of_unfinished_uploads(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_uploads, "MAX_OPEN_UPLOADS_PER_TENANT", 2)
    reasons = [await begin(name) for name in ("a", "b", "c", "a")]
    assert reasons == ["", "", "TOO_MANY_UPLOADS", ""]


LONG = "a" * 100_000


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("RevokeKey", pb.RevokeKeyRequest(key_id=LONG), "key_id"),
        ("CreateKey", pb.CreateKeyRequest(scopes=["reader", LONG]), "scopes"),
        ("SetSharing", pb.SetSharingRequest(name="a", shared_with=["!"] * 1001), "shared_with"),
        (
            "DescribeAdapter",
            pb.DescribeAdapterRequest(name="a", remove_labels=[""] * 65),
            "remove_labels",
        ),
        (
            "CreateUpload",
            pb.CreateUploadRequest(options=pb.PublishOptions(name="a"), files=[pb.FileSpec()] * 65),
            "files",
        ),
        (
            "CreateUpload",
            pb.CreateUploadRequest(
                options=pb.PublishOptions(name="a"), files=[pb.FileSpec(path=LONG)]
            ),
            LONG[:1024],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_long_ids_and_lists_are_refused_by_name(
    registry: Registry, address: str, method: str, request_: Any, field: str
) -> None:
    """Their errors also have to fit into trailers, or clients get none."""
    _, token = await registry.keys.create("globex", ["admin", "publisher"], 0.0, "")
    async with grpc.aio.insecure_channel(address) as channel:
        call = getattr(registry_pb2_grpc.RegistryServiceStub(channel), method)
        with pytest.raises(grpc.RpcError) as refused:
            await call(request_, metadata=[("authorization", f"Bearer {token}")])
    error = from_rpc_error(refused.value)
    assert error.violations[0].field == field
    assert len(error.message) <= 1000


async def test_a_scope_that_is_given_thousands_of_times_is_stored_once(registry: Registry) -> None:
    record, _ = await registry.keys.create("globex", ["reader", "admin"] * 50_000, 0.0, "")
    assert record.scopes == ("reader", "admin")


async def test_a_page_of_few_keys_among_many_of_others_reads_a_bounded_part(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_BATCH_KEYS", 2)
    monkeypatch.setattr(keys, "_MAX_READ", 6)
    own = {(await registry.keys.create("globex", ["reader"], 0.0, ""))[0].key_id for _ in range(3)}
    for _ in range(20):
        await registry.keys.create("acme", ["reader"], 0.0, "")
    found, after, num_pages = [], "", 0
    while not num_pages or after:
        records, after = await registry.keys.page("globex", 100, after)
        found += [record.key_id for record in records]
        num_pages += 1
    assert found == sorted(own)
    assert num_pages == 4


async def test_a_page_of_keys_does_not_end_at_a_file_that_is_no_key(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is no page token, so that nobody could go on from there."""
    monkeypatch.setattr(keys, "_BATCH_KEYS", 1)
    monkeypatch.setattr(keys, "_MAX_READ", 1)
    made = {(await registry.keys.create("acme", ["reader"], 0.0, ""))[0].key_id for _ in range(3)}
    await registry.store.put(layout.key("0-notes"), b"no key")
    found, after, num_pages = set[str](), "", 0
    while not num_pages or after:
        records, after = await registry.keys.page("acme", 100, after)
        found |= {record.key_id for record in records}
        num_pages += 1
    assert found == made


async def test_a_list_goes_on_once_its_next_page_is_within_the_rate(
    registry: Registry, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of an adapter with thousands of versions uses up the rate of some seconds."""
    for seed in range(3):
        await publish(registry, "globex/sql", seed)
    _, token = await registry.keys.create("globex", ["reader"], 0.0, "")
    monkeypatch.setattr(registry_client, "PAGE_SIZE", 1)
    limits = {"CALL_BURST": 10, "CALLS_PER_S": 20, "MAX_CALL_WAIT_S": 0, "REFUSAL_DELAY_S": 0}
    for name, value in limits.items():
        monkeypatch.setattr(call_rates, name, value)
    async with RegistryClient(address, Credentials(api_key=token)) as reader:
        listed = reader.list(name="sql", all_versions=True)
        assert [version.version async for version in listed] == [1, 2, 3]
