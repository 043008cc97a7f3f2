"""Probes and scrapes over a real socket."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter

from loraplex.errors import InvalidRequest
from loraplex_services.common.metrics import MetricsServer


async def _get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def test_serves_metrics_and_probes() -> None:
    registry = CollectorRegistry()
    Counter("loraplex_test_things", "Things.", registry=registry).inc(3)
    ready = False
    server = MetricsServer(lambda: ready, registry=registry)
    await server.start("127.0.0.1:0")
    assert await _get(server.port, "/healthz") == (200, "ok\n")
    assert await _get(server.port, "/readyz") == (503, "not ready\n")
    ready = True
    assert await _get(server.port, "/readyz?verbose") == (200, "ok\n")
    status, body = await _get(server.port, "/metrics")
    assert status == 200
    assert "loraplex_test_things_total 3.0" in body
    assert (await _get(server.port, "/"))[0] == 404
    assert (await _get(server.port, "/metrics", "POST"))[0] == 405
    await server.stop()


async def test_taken_port_names_the_setting() -> None:
    server = MetricsServer(lambda: True, registry=CollectorRegistry())
    await server.start("127.0.0.1:0")
    second = MetricsServer(lambda: True, registry=CollectorRegistry())
    with pytest.raises(InvalidRequest, match="LORAPLEX_METRICS_LISTEN"):
        await second.start(f"127.0.0.1:{server.port}")
    await server.stop()
