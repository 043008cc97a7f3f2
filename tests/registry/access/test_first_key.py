"""The first admin key: made once, without a key, from the registry's own machine only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import AlreadyExists, LoraplexError, Unauthenticated
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.registry.access.auth import (
    FIRST_KEY_METHOD,
    NOBODY,
    KeyAuth,
    is_local_peer,
)
from loraplex_services.registry.access.keys import Keys
from loraplex_services.registry.api import server
from loraplex_services.registry.assembly import Registry


@pytest.fixture
async def address(registry: Registry) -> AsyncIterator[str]:
    auth = KeyAuth(registry.keys, "service-token-of-16")
    running = await grpc_server.start([server.service(registry)], ["127.0.0.1:0"], auth=auth)
    yield f"127.0.0.1:{running.port}"
    await running.stop(0)


async def test_first_key_needs_no_key_and_may_do_everything(
    registry: Registry, address: str
) -> None:
    async with RegistryClient(address) as stranger:
        key, token = await stranger.admin.create_first_key()
        with pytest.raises(Unauthenticated):
            await stranger.admin.keys()
    async with RegistryClient(address, Credentials(api_key=token)) as admin:
        assert [k.key_id for k in await admin.admin.keys()] == [key.key_id]
        _, other = await admin.admin.create_key("acme", ["publisher"])
        await admin.admin.reindex()
        actions = [entry.action async for entry in admin.admin.audit()]
    assert actions == ["key.create", "key.bootstrap"]
    assert (await registry.keys.check(other)).tenant == "acme"


async def test_there_is_one_first_key_even_after_its_revocation(
    registry: Registry, address: str
) -> None:
    async with RegistryClient(address) as stranger:
        asked = await asyncio.gather(
            *(stranger.admin.create_first_key() for _ in range(5)), return_exceptions=True
        )
        refused = [answer for answer in asked if isinstance(answer, LoraplexError)]
        [(key, _)] = [answer for answer in asked if isinstance(answer, tuple)]
        assert len(refused) == 4 and all(isinstance(e, AlreadyExists) for e in refused)
        await registry.keys.revoke(key.key_id)
        with pytest.raises(AlreadyExists, match="LORAPLEX_ADMIN_KEY_FILE"):
            await stranger.admin.create_first_key()


async def test_a_key_of_one_tenant_does_not_count(registry: Registry, address: str) -> None:
    await registry.keys.create("acme", ["admin"], 0.0, "")
    async with RegistryClient(address) as stranger:
        await stranger.admin.create_first_key()


async def test_nobody_may_call_nothing_else(registry: Registry) -> None:
    auth = KeyAuth(Keys(registry.store), "")
    assert await auth.check(FIRST_KEY_METHOD, {}) is NOBODY
    with pytest.raises(Unauthenticated):
        await auth.check(FIRST_KEY_METHOD.replace("CreateFirstKey", "CreateKey"), {})


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        ("ipv4:127.0.0.1:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::1]:4711", True),
        ("unix:", True),
        ("unix:/run/x.sock", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4711", True),
        ("ipv4:10.0.0.7:4711", False),
        ("ipv6:%5B2001:db8::1%5D:4711", False),
        ("ipv6:%5B::ffff:10.0.0.7%5D:4711", False),
        ("", False),
    ],
)
def test_where_a_call_comes_from(peer: str, is_here: bool) -> None:
    assert is_local_peer(peer) is is_here
