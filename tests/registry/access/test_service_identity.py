"""Services know each other by certificates: a registry with one API for people and one for
services."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import InvalidRequest, LoraplexError, Unauthenticated, Unavailable
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.grpc.channels import Channels
from loraplex_services.common.security.service_token import ServiceAuth
from loraplex_services.common.security.tls import TlsFiles, tls_files
from loraplex_services.gateway.registry import link as registry_link
from loraplex_services.gateway.registry.link import RegistryLink
from loraplex_services.gateway.registry.resolve import Resolver
from loraplex_services.registry.access.auth import KeyAuth
from loraplex_services.registry.api import server
from loraplex_services.registry.assembly import Registry
from loraplex_services.registry.config import from_env
from tests.certificates import Authority, Pair


@pytest.fixture
def house(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "house")


class TwoListeners:
    """One registry that listens for people and for services."""

    def __init__(self, people: int, services: int, token: str) -> None:
        self.people = f"127.0.0.1:{people}"
        self.services = f"127.0.0.1:{services}"
        self.admin_token = token


@pytest.fixture
async def listeners(registry: Registry, house: Authority) -> AsyncIterator[TwoListeners]:
    own = house.issue("registry")
    tls = TlsFiles(house.ca, own.cert, own.key)
    service_tls = tls.server(for_services=True)
    assert service_tls is not None
    running = await grpc_server.start(
        [server.service(registry)],
        ["127.0.0.1:0"],
        auth=KeyAuth(registry.keys, "", ("gateway", "worker")),
        tls=tls.server(),
        service_listener=("127.0.0.1:0", service_tls),
    )
    _, token = await registry.keys.create("default", ["admin"], 0, "")
    yield TwoListeners(running.ports[0], running.ports[1], token)
    await running.stop(0)


async def _bases(address: str, credentials: Credentials) -> int:
    async with RegistryClient(address, credentials) as client:
        return len(await client.admin.bases())


def _shown(authority: Authority, pair: Pair | None, token: str = "") -> Credentials:
    return Credentials(token, authority.ca, pair and pair.cert, pair and pair.key)


async def test_people_come_with_keys_over_tls(listeners: TwoListeners, house: Authority) -> None:
    assert await _bases(listeners.people, _shown(house, None, listeners.admin_token)) == 1
    with pytest.raises(Unauthenticated):
        await _bases(listeners.people, _shown(house, None))
    with pytest.raises(Unavailable):
        await _bases(listeners.people, Credentials(listeners.admin_token))


async def test_a_certificate_is_no_key_at_the_api_for_people(
    listeners: TwoListeners, house: Authority
) -> None:
    with pytest.raises(Unauthenticated):
        await _bases(listeners.people, _shown(house, house.issue("gateway")))


async def test_a_service_is_authenticated_by_its_certificate_alone(
    listeners: TwoListeners, house: Authority
) -> None:
    assert await _bases(listeners.services, _shown(house, house.issue("gateway"))) == 1


async def test_no_other_caller_reaches_the_api_for_services(
    listeners: TwoListeners, house: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "elsewhere").issue("gateway")
    for credentials in (
        _shown(house, None, listeners.admin_token),
        _shown(house, stranger),
        Credentials(),
    ):
        with pytest.raises(LoraplexError) as refused:
            await _bases(listeners.services, credentials)
        assert isinstance(refused.value, Unavailable)
    with pytest.raises(Unauthenticated):
        await _bases(listeners.services, _shown(house, house.issue("printer")))


async def test_gateways_reach_the_registry_by_their_certificate(
    listeners: TwoListeners, house: Authority
) -> None:
    own = house.issue("gateway")
    link = RegistryLink(
        listeners.services, channels=Channels(TlsFiles(house.ca, own.cert, own.key))
    )
    try:
        key = await link.check_key(listeners.admin_token)
        assert key.tenant == "default"
    finally:
        await link.close()


async def test_a_gateway_shows_the_certificate_that_lies_there_now(
    listeners: TwoListeners, house: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_link, "_RENEW_CHECK_S", 0.05)
    own, other = house.issue("printer"), house.issue("gateway")
    tls = TlsFiles(house.ca, own.cert, own.key)
    link = RegistryLink(listeners.services, channels=Channels(tls))
    following = asyncio.create_task(link.follow(Resolver(link, dict)))
    try:
        with pytest.raises(Unauthenticated):
            await link.tenant("default")
        assert not link.has_snapshot.is_set()
        own.cert.write_bytes(other.cert.read_bytes())
        own.key.write_bytes(other.key.read_bytes())
        await asyncio.wait_for(link.has_snapshot.wait(), 20)
    finally:
        following.cancel()
        await link.close()


async def test_the_api_for_services_takes_the_token_or_the_certificate(
    registry: Registry, house: Authority
) -> None:
    """What workers do: everybody shows a certificate, and only services' names open."""
    own = house.issue("worker")
    running = await grpc_server.start(
        [server.service(registry)],
        ["127.0.0.1:0"],
        auth=ServiceAuth(token := secrets.token_hex(16), ["gateway"]),
        tls=TlsFiles(house.ca, own.cert, own.key).server(for_services=True),
    )
    address = f"127.0.0.1:{running.port}"
    try:
        assert await _bases(address, _shown(house, house.issue("gateway"))) == 1
        assert await _bases(address, _shown(house, house.issue("printer"), token)) == 1
        with pytest.raises(Unauthenticated):
            await _bases(address, _shown(house, house.issue("printer")))
    finally:
        await running.stop(0)


def test_half_a_certificate_and_a_service_api_without_a_ca_are_refused_by_name(
    house: Authority, tmp_path: Path
) -> None:
    own = house.issue("registry")
    with pytest.raises(InvalidRequest, match="LORAPLEX_KEY"):
        tls_files({"LORAPLEX_CERT": str(own.cert)})
    with pytest.raises(InvalidRequest, match="LORAPLEX_CA"):
        tls_files({"LORAPLEX_CA": str(tmp_path / "missing.pem")})
    other = house.issue("other")
    ours = {"LORAPLEX_CERT": str(own.cert), "LORAPLEX_KEY": str(own.key)}
    with pytest.raises(InvalidRequest, match=r"LORAPLEX_CERT: .*KEY_VALUES_MISMATCH"):
        tls_files({**ours, "LORAPLEX_KEY": str(other.key)})
    with pytest.raises(InvalidRequest, match="LORAPLEX_CERT: must be a PEM certificate"):
        tls_files({**ours, "LORAPLEX_CERT": str(own.key)})
    with pytest.raises(InvalidRequest, match="LORAPLEX_CA: must be a PEM certificate"):
        tls_files({**ours, "LORAPLEX_CA": str(own.key)})
    for listen, reason in (
        ("127.0.0.1:1,mtls:127.0.0.1:2", "needs LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY"),
        ("127.0.0.1:1,127.0.0.1:2", "ADDRESS,mtls:HOST:PORT"),
        ("127.0.0.1:1,mtls:127.0.0.1:2,mtls:127.0.0.1:3", "ADDRESS,mtls:HOST:PORT"),
    ):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            from_env({"LORAPLEX_REGISTRY_LISTEN": listen, "LORAPLEX_STATE_DIR": str(tmp_path)})
        assert caught.value.violations[0].field == "LORAPLEX_REGISTRY_LISTEN"
