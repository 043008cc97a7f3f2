"""Real metadata servers: behind TLS with a CA of one's own, and behind a Sentinel."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import LoraplexError
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.registry.index.metadata_server import find_binary
from tests.certificates import Authority
from tests.registry.house import adapter_files, register_base, write_folder
from tests.registry.process import RegistryProcess
from tests.servers import free_port, redis_with_tls

pytestmark = pytest.mark.e2e
WAIT_S = 40.0


@contextmanager
def _running(*command: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _until(answers: Callable[[], object]) -> None:
    """Wait until a question is answered with something true."""
    deadline_s = asyncio.get_running_loop().time() + WAIT_S
    while True:
        try:
            if await answers():  # type: ignore[misc]
                return
        except (RedisError, LoraplexError, OSError):
            pass
        assert asyncio.get_running_loop().time() < deadline_s
        await asyncio.sleep(0.1)


async def _publish(client: RegistryClient, folder: Path, seed: int) -> int:
    write_folder(folder, adapter_files(seed))
    return (await client.upload(folder, Publication("sql"))).version.version


async def test_the_index_lives_behind_tls_and_client_certificates(tmp_path: Path) -> None:
    binary = redis_with_tls()
    house = Authority(tmp_path / "house")
    own, client_pair = house.issue("redis"), house.issue("registry")
    port = free_port()
    command = [
        *(binary, "--port", "0", "--tls-port", str(port), "--save", ""),
        *("--tls-cert-file", str(own.cert), "--tls-key-file", str(own.key)),
        *("--tls-ca-cert-file", str(house.ca), "--tls-auth-clients", "yes"),
    ]
    files = f"ssl_certfile={client_pair.cert}&ssl_keyfile={client_pair.key}"
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={house.ca}&{files}"
    with _running(*command, folder=tmp_path / "redis"):
        good = connect_redis(url)
        await _until(good.ping)
        await good.aclose()
        other = Authority(tmp_path / "other").ca
        for bad_url in (f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={other}&{files}",
                        f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={house.ca}",
                        f"redis://127.0.0.1:{port}/0"):  # fmt: skip
            bad = connect_redis(bad_url)
            with pytest.raises((RedisConnectionError, RedisError)):
                await bad.ping()
            await bad.aclose()
        registry = RegistryProcess(tmp_path / "state", LORAPLEX_METADATA=url)
        await registry.start()
        try:
            async with RegistryClient(registry.address, Credentials()) as client:
                await register_base(client)
                assert await _publish(client, tmp_path / "a", 1) == 1
                assert [v.version async for v in client.list()] == [1]
        finally:
            await registry.kill()


async def test_replaced_tls_files_are_read_when_a_connection_is_opened(tmp_path: Path) -> None:
    binary = redis_with_tls()
    port, ca = free_port(), tmp_path / "ca.pem"
    client = connect_redis(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ca}")
    for name in ("first", "second"):
        house = Authority(tmp_path / name)
        own = house.issue("redis")
        ca.write_bytes(house.ca.read_bytes())
        command = [
            *(binary, "--port", "0", "--tls-port", str(port), "--save", ""),
            *("--tls-cert-file", str(own.cert), "--tls-key-file", str(own.key)),
            *("--tls-ca-cert-file", str(house.ca), "--tls-auth-clients", "no"),
        ]
        with _running(*command, folder=tmp_path / f"redis-{name}"):
            await _until(client.ping)
    await client.aclose()


class Sentineled:
    """A primary, a replica, and a Sentinel that watches them."""

    def __init__(self, url: str, primary: subprocess.Popen[bytes], ports: tuple[int, int]) -> None:
        self.url = url
        self.primary = primary
        self.ports = ports


@dataclass(frozen=True, slots=True)
class Servers:
    """How the servers of a test are started and reached."""

    binary: str
    scheme: str = "redis"
    port: str = "--port"
    options: tuple[str, ...] = ()
    query: str = ""
    sentinel_query: str = ""

    def command(self, port: int, *more: str) -> tuple[str, ...]:
        """Starts one on a port."""
        listen = ("--bind", "127.0.0.1", self.port, str(port))
        return (self.binary, *more, *listen, *self.options)

    def client(self, port: int) -> Any:
        """A client of one of them."""
        return connect_redis(f"{self.scheme}://127.0.0.1:{port}/0{self.query}")


@pytest.fixture(params=["plain", "tls"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Servers:
    if request.param == "plain":
        return Servers(str(find_binary()))
    house = Authority(tmp_path / "house")
    own = house.issue("redis")
    options = (
        *("--port", "0", "--tls-cert-file", str(own.cert), "--tls-key-file", str(own.key)),
        *("--tls-ca-cert-file", str(house.ca), "--tls-auth-clients", "no"),
        *("--tls-replication", "yes"),
    )
    query = f"?ssl_ca_certs={house.ca}"
    return Servers(redis_with_tls(), "rediss", "--tls-port", options, query, query + "&tls=true")


@pytest.fixture
async def sentineled(servers: Servers, tmp_path: Path) -> AsyncIterator[Sentineled]:
    primary, replica, watcher = (free_port() for _ in range(3))
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"sentinel monitor loraplex 127.0.0.1 {primary} 1\n"
        "sentinel down-after-milliseconds loraplex 400\n"
        "sentinel failover-timeout loraplex 3000\n"
    )
    with ExitStack() as stack:
        empty = ("--save", "")
        first = stack.enter_context(
            _running(*servers.command(primary, *empty), folder=tmp_path / "primary")
        )
        copy_of = ("--replicaof", f"127.0.0.1 {primary}", "--repl-diskless-sync-delay", "0")
        stack.enter_context(
            _running(*servers.command(replica, *empty, *copy_of), folder=tmp_path / "replica")
        )
        client = servers.client(replica)

        async def is_synced() -> bool:
            info = await client.info("replication")
            return bool(info["master_link_status"] == "up")

        await _until(is_synced)
        await client.aclose()
        watching = servers.command(watcher, str(config), "--sentinel")
        stack.enter_context(_running(*watching, folder=tmp_path / "sentinel"))
        asked = servers.client(watcher)

        async def knows_the_replica() -> bool:
            return bool(await asked.execute_command("SENTINEL", "REPLICAS", "loraplex"))

        await _until(knows_the_replica)
        await asked.aclose()
        url = f"redis+sentinel://127.0.0.1:{watcher}/loraplex{servers.sentinel_query}"
        yield Sentineled(url, first, (primary, replica))


@pytest.mark.long
async def test_the_registry_follows_a_failover_and_loses_nothing(
    sentineled: Sentineled, tmp_path: Path
) -> None:
    registry = RegistryProcess(tmp_path / "state", LORAPLEX_METADATA=sentineled.url)
    await registry.start()
    try:
        async with RegistryClient(registry.address, Credentials()) as client:
            await register_base(client)
            numbers = [await _publish(client, tmp_path / str(seed), seed) for seed in (1, 2)]
            assert numbers == [1, 2]
            sentineled.primary.kill()
            # Answers come from the objects meanwhile: nothing acknowledged is missing.
            assert (await client.get("sql")).version.version == 2

            async def leads() -> bool:
                new = connect_redis(sentineled.url)
                try:
                    pool: Any = new.connection_pool
                    return bool(
                        await pool.get_master_address() == ("127.0.0.1", sentineled.ports[1])
                    )
                finally:
                    await new.aclose()

            await _until(leads)
            assert await _publish(client, tmp_path / "3", 3) == 3

            async def all_listed() -> bool:
                found = [v.version async for v in client.list(name="sql", all_versions=True)]
                return found == [1, 2, 3]

            await _until(all_listed)
    finally:
        await registry.kill()
