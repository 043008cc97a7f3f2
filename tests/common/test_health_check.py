"""Asking a real server whether it is ready."""

from loraplex_services.common.grpc_server import start
from loraplex_services.common.health_check import is_serving


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
