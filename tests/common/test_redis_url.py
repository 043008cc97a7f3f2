"""Addresses of the metadata server: every form that is promised, and clear refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio.connection import SSLConnection
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as TimedOut

from loraplex.errors import InvalidRequest
from loraplex_services.common import redis_url
from loraplex_services.common.redis_url import connect_redis
from tests.servers import running_metadata


def test_plain_tls_and_socket_urls_are_understood() -> None:
    plain = connect_redis("redis://user:secret@meta:6380/3").connection_pool.connection_kwargs
    assert (plain["host"], plain["port"], plain["db"]) == ("meta", 6380, 3)
    secure = connect_redis("rediss://meta").connection_pool
    assert issubclass(secure.connection_class, SSLConnection)
    socket = connect_redis("unix:///run/meta.sock").connection_pool.connection_kwargs
    assert socket["path"] == "/run/meta.sock"


def test_sentinel_urls_name_nodes_service_and_database() -> None:
    client = connect_redis("redis+sentinel://me:pa%20ss@a:1,b,[::1]:3/mymaster/2")
    pool: Any = client.connection_pool
    kwargs = pool.connection_kwargs
    assert pool.service_name == "mymaster"
    nodes = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(n["host"], n["port"]) for n in nodes] == [("a", 1), ("b", 26379), ("::1", 3)]
    assert (kwargs["db"], kwargs["username"], kwargs["password"]) == (2, "me", "pa ss")


@pytest.mark.parametrize(
    "url",
    ["http://meta", "meta:6379", "redis+sentinel://a:1", "redis+sentinel://a:x/mymaster", ""],
)
def test_other_addresses_are_refused_naming_the_variable(url: str) -> None:
    with pytest.raises(InvalidRequest, match="LORAPLEX_METADATA"):
        connect_redis(url)


@pytest.mark.parametrize(
    "url", ["redis://a/0?tsl=1", "rediss://a?ssl_cert_reqs=no", "redis+sentinel://a/s?ssl_ca=x"]
)
def test_options_that_do_not_exist_are_refused_when_a_service_starts(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"LORAPLEX_METADATA.*query"):
        connect_redis(url)


def test_a_refused_address_does_not_show_its_password() -> None:
    with pytest.raises(InvalidRequest) as refused:
        connect_redis("redis+sentinel://me:secret@a:1")
    assert "secret" not in str(refused.value) + refused.value.violations[0].value


async def test_a_server_that_hangs_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_url, "_TIMEOUT_S", 0.2)
    connections: list[asyncio.StreamWriter] = []

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_unix_server(hang, tmp_path / "s")
    client = connect_redis(f"unix://{tmp_path}/s")
    with pytest.raises(TimedOut):
        await client.get("x")
    assert len(connections) == 1
    await client.aclose()
    for writer in connections:
        writer.close()
    server.close()


def test_a_connection_that_the_server_reset_is_an_error_of_redis_under_uvloop_too(
    tmp_path: Path,
) -> None:
    """uvloop raises RuntimeError where asyncio raises ConnectionError."""

    async def ask_again() -> None:
        with running_metadata() as (url, _):
            # A client of one connection sends without a look at it, as others do just before.
            client = await connect_redis(url).client()
            client.connection._writer.transport.abort()
            await asyncio.sleep(0)
            with pytest.raises(RedisError):
                await client.ping()
            await client.aclose()

    uvloop.run(ask_again())
