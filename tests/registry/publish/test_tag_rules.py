"""A tenant's bound on how far versions may be from their reference: who may measure, and what
tags then point at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.api.registry import Certificate
from loraplex.api.tenants import Tenant
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import AdapterNotFound, InvalidRequest, NotCertified, PermissionDenied
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.registry.access.auth import KeyAuth
from loraplex_services.registry.api import server
from tests.registry.conftest import ServedRegistry
from tests.registry.house import BASE_ID, publish, upload

NEAR = Certificate(BASE_ID, "bf16 at host:1", "ab" * 32, 400, 0.01, 0.3, 0.99)
FAR = replace(NEAR, mean_kl=0.21)
SERVICE_TOKEN = "the-token-of-all-services"


@pytest.fixture
async def bounded(served: ServedRegistry) -> RegistryClient:
    """A client with all rights. Tenant acme has a bound of 0.05 and three versions, `prod` at the
    first."""
    for seed in (1, 2, 3):
        await publish(served.registry, "acme/a", seed, latest=False)
    await served.client.set_tag("acme/a", "prod", {1: 1})
    await served.client.admin.set_tenant(Tenant("acme", max_kl=0.05), ["max_kl"])
    return served.client


@pytest.fixture
async def keyed(served: ServedRegistry) -> AsyncIterator[str]:
    """The address of the same registry, where callers have keys."""
    registry = served.registry
    auth = KeyAuth(registry.keys, SERVICE_TOKEN, ())
    running = await grpc_server.start([server.service(registry)], ["127.0.0.1:0"], auth=auth)
    yield f"127.0.0.1:{running.port}"
    await running.stop(0)


def reason_of(refused: pytest.ExceptionInfo[NotCertified]) -> tuple[str, str]:
    [violation] = refused.value.violations
    assert violation.field == "max_kl"
    return violation.value, violation.description


async def test_a_tag_moves_to_what_the_operator_certified_and_to_nothing_else(
    bounded: RegistryClient,
) -> None:
    with pytest.raises(NotCertified) as refused:
        await bounded.set_tag("acme/a", "prod", {2: 1})
    assert reason_of(refused)[0] == "not measured"
    await bounded.admin.set_certificate("acme/a:v2", FAR)
    with pytest.raises(NotCertified) as refused:
        await bounded.set_tag("acme/a", "prod", {1: 9, 2: 1})
    await bounded.admin.set_certificate("acme/a:v1", NEAR)
    with pytest.raises(NotCertified) as refused:
        await bounded.set_tag("acme/a", "prod", {1: 9, 2: 1})
    value, why = reason_of(refused)
    assert value == "0.21"
    assert "acme/a:v2" in why and "bound of 0.05" in why and "registry certify" in why
    await bounded.admin.set_certificate("acme/a:v2", NEAR)
    await bounded.set_tag("acme/a", "prod", {1: 9, 2: 1})
    assert [t.version for t in (await bounded.get("acme/a:v1")).tags[0].targets] == [1, 2]


async def test_the_last_certificate_of_each_scheme_counts_and_the_worst_scheme_decides(
    bounded: RegistryClient,
) -> None:
    set_certificate = bounded.admin.set_certificate
    await set_certificate("acme/a:v2", replace(FAR, reference="measured wrongly"))
    await set_certificate("acme/a:v2", NEAR)
    await bounded.set_tag("acme/a", "good", {2: 1})
    await set_certificate("acme/a:v2", replace(FAR, quantization="int4"))
    with pytest.raises(NotCertified, match=r"in int4 diverges by 0\.21"):
        await bounded.set_tag("acme/a", "prod", {2: 1})
    await set_certificate("acme/a:v3", replace(NEAR, base_id="another/base"))
    with pytest.raises(NotCertified, match="no certificate by the operator on base"):
        await bounded.set_tag("acme/a", "prod", {3: 1})


async def test_a_tenant_does_not_certify_its_own(
    served: ServedRegistry, bounded: RegistryClient, keyed: str
) -> None:
    for scope in ("publisher", "admin"):
        _, key = await served.registry.keys.create("acme", [scope], 0, "")
        async with RegistryClient(keyed, Credentials(api_key=key)) as client:
            stored = await client.admin.set_certificate("a:v2", NEAR)
            assert not stored.by_operator
            with pytest.raises(NotCertified):
                await client.set_tag("a", "prod", {2: 1})
            with pytest.raises(PermissionDenied):
                await client.admin.set_tenant(Tenant("acme"), ["max_kl"])
    await bounded.admin.set_certificate("acme/a:v2", FAR)
    async with RegistryClient(keyed, Credentials(api_key=key)) as client:
        with pytest.raises(PermissionDenied, match="the operator has certified"):
            await client.admin.set_certificate("a:v2", NEAR)
        await client.admin.set_certificate("a:v2", replace(NEAR, reference="another"))
        with pytest.raises(NotCertified, match=r"diverges by 0\.21"):
            await client.set_tag("a", "prod", {2: 1})


async def test_other_tenants_do_not_learn_whose_key_measured_a_version(
    served: ServedRegistry, bounded: RegistryClient, keyed: str
) -> None:
    await bounded.set_sharing("acme/a", visibility="public")
    record, key = await served.registry.keys.create("acme", ["publisher"], 0, "")
    async with RegistryClient(keyed, Credentials(api_key=key)) as owner:
        await owner.admin.set_certificate("a:v2", NEAR)
        [seen] = await owner.admin.certificates("a:v2")
        assert seen.creator == record.key_id
    _, key = await served.registry.keys.create("globex", ["admin"], 0, "")
    async with RegistryClient(keyed, Credentials(api_key=key)) as stranger:
        assert await stranger.admin.certificates("acme/a:v2") == [replace(seen, creator="")]


async def test_a_service_certifies_for_the_operator(bounded: RegistryClient, keyed: str) -> None:
    async with RegistryClient(keyed, Credentials(api_key=SERVICE_TOKEN)) as service:
        assert (await service.admin.set_certificate("acme/a:v2", NEAR)).by_operator
    await bounded.set_tag("acme/a", "prod", {2: 1})


async def test_an_upload_moves_no_tag_before_it_is_certified(
    bounded: RegistryClient, tmp_path: Path
) -> None:
    for options in ({}, {"latest": False, "tags": ("prod",)}):
        with pytest.raises(NotCertified, match="--no-latest"):
            await upload(bounded, tmp_path, "acme/b", 5, **options)
    with pytest.raises(AdapterNotFound):
        await bounded.get("acme/b:v1")
    done = await upload(bounded, tmp_path, "acme/b", 5, latest=False)
    await bounded.admin.set_certificate(done.version.ref, NEAR)
    await bounded.set_tag("acme/b", "latest", {done.version.version: 1})


async def test_rollbacks_and_a_falling_latest_pass_over_what_is_not_certified(
    bounded: RegistryClient,
) -> None:
    await bounded.admin.set_tenant(Tenant("acme"), ["max_kl"])
    for version in (2, 3):
        await bounded.set_tag("acme/a", "prod", {version: 1})
        await bounded.set_tag("acme/a", "latest", {version: 1})
    await bounded.admin.set_certificate("acme/a:v1", NEAR)
    await bounded.admin.set_tenant(Tenant("acme", max_kl=0.05), ["max_kl"])
    tag = await bounded.rollback("acme/a", "prod")
    assert [target.version for target in tag.targets] == [1]
    await bounded.delete("acme/a:v3")
    latest = next(t for t in (await bounded.get("acme/a:v1")).tags if t.tag == "latest")
    assert [target.version for target in latest.targets] == [1]


@pytest.mark.parametrize("max_kl", [-0.1, float("nan"), float("inf")])
async def test_a_bound_that_is_none_is_refused(served: ServedRegistry, max_kl: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await served.client.admin.set_tenant(Tenant("acme", max_kl=max_kl), ["max_kl"])
    assert refused.value.violations[0].field == "tenant.max_kl"
