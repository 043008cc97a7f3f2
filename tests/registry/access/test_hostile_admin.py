"""What a tenant's admin sends cannot break the administration of keys and tenants for others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import DataLoss, InvalidRequest
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common import grpc_server
from loraplex_services.common.limits import MAX_DESCRIPTION_CHARS
from loraplex_services.registry import layout
from loraplex_services.registry.access.auth import KeyAuth
from loraplex_services.registry.api import server
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.records import TenantRecord, encode

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
    assert [record.key_id for record in await registry.keys.list("")] == [good.key_id]
    with pytest.raises(DataLoss, match=key):
        await registry.keys.revoke(bad.key_id)


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


@pytest.mark.parametrize("token", ["bnVsbA==", "WyJhIiwxZTk5OV0="])
async def test_page_token_of_another_shape_is_an_invalid_request(
    registry: Registry, token: str
) -> None:
    service = server.RegistryService(registry)
    with pytest.raises(InvalidRequest, match="page_token"):
        await service.ListAdapters(pb.ListAdaptersRequest(page_token=token), None)
