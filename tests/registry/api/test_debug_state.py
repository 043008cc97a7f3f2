"""What /debug/state of a registry shows."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.registry.api import debug_state, server
from loraplex_services.registry.api.debug_state import RegistryState
from loraplex_services.registry.assembly import Registry
from tests.registry.process import RegistryProcess
from tests.servers import free_port

TOKEN = "t" * 32
WATCH = "/loraplex.v1.RegistryService/WatchAdapters"


def _read(port: int) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/debug/state", headers={"authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        state: dict[str, Any] = json.load(answer)
        return state


async def test_it_shows_the_index_and_the_open_calls(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_state, "MAX_LISTED", 2)
    running = await grpc_server.start([server.service(registry)], ["127.0.0.1:0"])
    state = RegistryState(registry, running)
    async with RegistryClient(f"127.0.0.1:{running.port}", Credentials()) as client:
        watches = [client.watch() for _ in range(3)]
        for watch in watches:
            assert (await anext(watch)).kind == "snapshot"
        async with asyncio.timeout(60):
            while state.read()["events"]["num_watchers"] < 3:
                await asyncio.sleep(0.01)
        shown = json.loads(json.dumps(state.read(), allow_nan=False))
    assert shown["num_calls"] == {WATCH: 3}
    assert [call["method"] for call in shown["oldest_calls"]] == [WATCH, WATCH]
    assert shown["oldest_calls"][0]["age_s"] >= shown["oldest_calls"][1]["age_s"]
    assert shown["oldest_calls"][0]["tenant"] == "default"
    assert shown["events"]["num_watchers"] == 3 and shown["events"]["problem"] == ""
    assert shown["index"] == {"is_rebuilding": False, "last_check_age_s": None, "problem": ""}
    assert shown["objects"] == registry.store.url
    await running.stop(0)
    async with asyncio.timeout(60):
        while state.read()["num_calls"]:  # The handlers end a moment later.
            await asyncio.sleep(0.01)


@pytest.mark.e2e
async def test_a_registry_that_is_not_ready_says_why(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    port = free_port()
    process = RegistryProcess(
        tmp_path / "state",
        LORAPLEX_METADATA=f"redis://127.0.0.1:{free_port()}/0",
        LORAPLEX_METRICS_LISTEN=f"127.0.0.1:{port}",
        LORAPLEX_SERVICE_TOKEN_FILE=str(tmp_path / "token"),
    )
    await process.start(wait=False)
    try:
        async with asyncio.timeout(60):
            while "not ready yet" not in process.log():
                await asyncio.sleep(0.05)
        state = await asyncio.to_thread(_read, port)
    finally:
        await process.kill()
    assert not state["is_ready"]
    assert "metadata" in state["not_ready_reason"]
