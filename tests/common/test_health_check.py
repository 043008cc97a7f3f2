"""Asking a real server whether it is ready."""

import pytest

from loraplex_services.common.grpc.health_check import is_serving
from loraplex_services.common.grpc.server import start


async def test_follows_a_server_through_its_life() -> None:
    running = await start([], ["127.0.0.1:0"])
    address = f"127.0.0.1:{running.port}"
    assert not await is_serving(address)
    assert await is_serving(address, "liveness")
    await running.set_ready(True)
    assert await is_serving(address)
    assert not await is_serving(address, "no.such.Service")
    await running.stop(0)
    assert not await is_serving(address)


async def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    running = await start([], ["127.0.0.1:0"])
    assert await is_serving(f"127.0.0.1:{running.port}", "liveness")
    await running.stop(0)
