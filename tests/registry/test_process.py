"""The registry as a process: start, refusals, drain, and children that die with it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import AdapterNotFound, Unavailable
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.registry.index.redis_calls import PREFIX
from tests.registry.house import adapter_files, register_base, write_folder
from tests.registry.process import RegistryProcess

pytestmark = pytest.mark.e2e


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[RegistryProcess]:
    registry = RegistryProcess(tmp_path / "state")
    yield registry
    await registry.kill()


def _client(process: RegistryProcess) -> RegistryClient:
    return RegistryClient(process.address, Credentials())


async def test_everything_is_there_after_a_kill_and_a_restart(
    process: RegistryProcess, tmp_path: Path
) -> None:
    await process.start()
    folder = write_folder(tmp_path / "adapter", adapter_files(1))
    async with _client(process) as client:
        await register_base(client)
        published = await client.upload(folder, Publication("sql", tags=["prod"]))
    await process.kill()
    await process.start()
    async with _client(process) as client:
        found = await client.get("sql:prod")
        assert found.version.digest == published.version.digest
        assert (await client.pull("sql", tmp_path / "pulled")).version == 1


async def test_the_metadata_server_dies_with_a_killed_registry(process: RegistryProcess) -> None:
    await process.start()
    assert process.process is not None
    children = psutil.Process(process.process.pid).children()
    assert [child.name() for child in children if "valkey" in child.name()] != []
    await process.kill()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert alive == [] and len(gone) == len(children)


async def test_sigterm_ends_it_with_status_0_and_it_waits_for_no_watch(
    process: RegistryProcess,
) -> None:
    await process.start(LORAPLEX_DRAIN_S="600")
    assert process.process is not None
    async with _client(process) as client:
        await register_base(client)
        watching = client.watch()
        while (await anext(watching)).kind != "base":
            pass
        process.process.send_signal(signal.SIGTERM)
        with pytest.raises(Unavailable) as caught:
            async for _ in watching:
                pass  # changes that were already on their way
        assert caught.value.reason == "UNAVAILABLE", "gateways resume where they were"
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"LORAPLEX_OBJECTS": "ftp://x"}, "LORAPLEX_OBJECTS"),
        ({"LORAPLEX_REGISTRY_LISTEN": "0.0.0.0:0"}, "LORAPLEX_AUTH=keys"),
        (
            {"LORAPLEX_AUTH": "keys", "LORAPLEX_ADMIN_KEY_FILE": "/no/such"},
            "LORAPLEX_ADMIN_KEY_FILE",
        ),
    ],
)
async def test_a_bad_setting_stops_the_start_and_is_named(
    process: RegistryProcess, variables: dict[str, str], named: str
) -> None:
    await process.start(wait=False, **variables)
    assert await process.wait() == 2
    assert named in process.log()


async def test_a_taken_port_for_metrics_is_named_and_nothing_else(
    process: RegistryProcess,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        await process.start(wait=False, LORAPLEX_METRICS_LISTEN=listen)
        assert await process.wait() == 2
    last = process.log().splitlines()[-1]
    assert last.startswith(f"registry: LORAPLEX_METRICS_LISTEN: cannot listen on {listen}")


async def test_a_store_of_another_layout_is_refused(
    process: RegistryProcess, tmp_path: Path
) -> None:
    objects = tmp_path / "state" / "objects"
    objects.mkdir(parents=True)
    (objects / "loraplex.json").write_text('{"layout": 99}')
    await process.start(wait=False)
    assert await process.wait() == 1
    assert "layout 99" in process.log()


async def test_the_first_admin_key_from_a_file_opens_a_guarded_registry(
    process: RegistryProcess, tmp_path: Path
) -> None:
    token = "lpx_first_" + "s" * 32
    (tmp_path / "admin.key").write_text(token + "\n")
    await process.start(LORAPLEX_AUTH="keys", LORAPLEX_ADMIN_KEY_FILE=str(tmp_path / "admin.key"))
    async with RegistryClient(process.address, Credentials(api_key=token)) as admin:
        request = pb.CreateKeyRequest(tenant="acme", scopes=["publisher"])
        created = await admin._channel.call(admin._stub.CreateKey, request)
    async with RegistryClient(process.address, Credentials(api_key=created.token)) as publisher:
        assert [version async for version in publisher.list()] == []


async def test_flushing_redis_under_load_changes_no_answer(
    process: RegistryProcess, tmp_path: Path, metadata_url: str
) -> None:
    import redis.asyncio

    await process.start(LORAPLEX_METADATA=metadata_url)
    raw = redis.asyncio.Redis.from_url(metadata_url)
    acknowledged: dict[str, str] = {}
    stop = asyncio.Event()

    async def write(client: RegistryClient) -> None:
        for seed in range(12):
            folder = write_folder(tmp_path / str(seed), adapter_files(seed))
            done = await client.upload(folder, Publication(f"a{seed % 3}"))
            acknowledged[f"a{seed % 3}:v{done.version.version}"] = done.version.digest

    async def read(client: RegistryClient) -> int:
        wrong = 0
        while not stop.is_set():
            for ref, digest in list(acknowledged.items()):
                try:
                    wrong += (await client.get(ref)).version.digest != digest
                except AdapterNotFound:
                    wrong += 1
            await asyncio.sleep(0.01)
        return wrong

    async def flush() -> None:
        while not stop.is_set():
            await raw.flushall()
            # A busy machine may not rebuild the index in any fixed time.
            while not stop.is_set() and not await raw.exists(f"{PREFIX}epoch"):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)

    async with _client(process) as client:
        await register_base(client)
        others = [asyncio.create_task(read(client)), asyncio.create_task(flush())]
        try:
            await write(client)
        finally:
            stop.set()
        assert (await asyncio.gather(*others))[0] == 0
        assert len(acknowledged) == 12
        listed = {}
        with contextlib.suppress(AdapterNotFound):
            listed = {
                f"{v.name}:v{v.version}": v.digest async for v in client.list(all_versions=True)
            }
        assert listed == acknowledged
    await raw.aclose()
