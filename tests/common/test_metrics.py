"""Probes and scrapes over a real socket."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from loraplex.errors import InvalidRequest
from loraplex_services.common.telemetry.metrics import MetricsServer

# What Prometheus 2 and 3 send.
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;q=0.5"


async def _get(
    port: int,
    path: str,
    method: str = "GET",
    token: str = "",
    accept: str = "",
    host: str = "localhost",
) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    shown += f"Accept: {accept}\r\n" if accept else ""
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{shown}\r\n".encode())
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
    await server.stop()


async def test_another_method_is_refused_with_the_one_to_use() -> None:
    server = MetricsServer(lambda: True, registry=CollectorRegistry())
    await server.start("127.0.0.1:0")
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{server.port}/metrics?all")
    await server.stop()
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert answer.text == "/metrics does not take POST: use GET\n"


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3])
async def test_prometheus_gets_exemplars_and_the_names_of_the_text_format(accept: str) -> None:
    registry = CollectorRegistry()
    Histogram("vllm:test_seconds", "Time.", registry=registry).observe(0.3, {"trace_id": "ab"})
    Counter("vllm:test_tokens", "Tokens.", registry=registry).inc()
    server = MetricsServer(lambda: True, registry=registry)
    await server.start("127.0.0.1:0")
    _, plain = await _get(server.port, "/metrics")
    _, body = await _get(server.port, "/metrics", accept=accept)
    await server.stop()
    samples = [
        s for family in openmetrics.text_string_to_metric_families(body) for s in family.samples
    ]
    exemplars = [sample.exemplar.labels for sample in samples if sample.exemplar]
    assert exemplars == [{"trace_id": "ab"}] and "trace_id" not in plain
    in_text = [s for family in text_string_to_metric_families(plain) for s in family.samples]
    assert {sample.name for sample in samples} == {sample.name for sample in in_text}


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("listen", "host", "status"),
    [
        ("127.0.0.1:0", "evil.example:9090", 403),
        ("127.0.0.1:0", "localhost.evil.example", 403),
        ("127.0.0.1:0", "127.0.0.1:9090", 200),
        ("127.0.0.1:0", "[::1]:9090", 200),
        ("127.0.0.1:0", "LOCALHOST", 200),
        ("0.0.0.0:0", "gateway.loraplex.svc:9090", 200),
    ],
)
async def test_a_page_whose_name_was_rebound_to_this_machine_reads_no_metrics(
    listen: str, host: str, status: int
) -> None:
    server = MetricsServer(lambda: True, registry=CollectorRegistry())
    await server.start(listen)
    assert (await _get(server.port, "/metrics", host=host))[0] == status
    assert (await _get(server.port, "/healthz", host=host))[0] == 200
    await server.stop()


async def test_taken_port_names_the_setting() -> None:
    server = MetricsServer(lambda: True, registry=CollectorRegistry())
    await server.start("127.0.0.1:0")
    second = MetricsServer(lambda: True, registry=CollectorRegistry())
    with pytest.raises(InvalidRequest, match="LORAPLEX_METRICS_LISTEN"):
        await second.start(f"127.0.0.1:{server.port}")
    await server.stop()


@pytest.fixture
async def debugged() -> AsyncIterator[MetricsServer]:
    server = MetricsServer(
        lambda: True,
        CollectorRegistry(),
        service_token="old-one\nnew-one",
        state=lambda: {"num_requests": 3},
    )
    await server.start("127.0.0.1:0")
    yield server
    await server.stop()


async def test_stacks_show_threads_and_tasks_to_who_has_the_service_token(
    debugged: MetricsServer,
) -> None:
    task = asyncio.create_task(asyncio.Event().wait(), name="a task of this test")
    status, body = await _get(debugged.port, "/debug/stacks", token="new-one")
    task.cancel()
    assert status == 200
    assert "thread MainThread" in body
    assert "task a task of this test: Event.wait" in body


async def test_a_profile_counts_the_stacks_of_a_busy_thread(debugged: MetricsServer) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="the-busy-one")
    thread.start()
    status, body = await _get(debugged.port, "/debug/profile?seconds=0.1", token="old-one")
    stop.set()
    thread.join()
    assert status == 200
    (line,) = [line for line in body.splitlines() if line.startswith("the-busy-one;")]
    assert "threading.Event.wait;threading.Condition.wait " in line
    assert int(line.rsplit(" ", 1)[1]) > 1


async def test_the_state_is_json(debugged: MetricsServer) -> None:
    status, body = await _get(debugged.port, "/debug/state", token="new-one")
    assert status == 200 and json.loads(body) == {"num_requests": 3}


async def test_a_service_without_a_state_names_what_it_has() -> None:
    server = MetricsServer(lambda: True, CollectorRegistry(), service_token="x")
    await server.start("127.0.0.1:0")
    answer = await _get(server.port, "/debug/state", token="x")
    assert answer == (404, "try /debug/stacks or /debug/profile?seconds=5\n")
    await server.stop()


@pytest.mark.parametrize(
    "path", ["/debug/stacks", "/debug/profile", "/debug/state", "/debug/other"]
)
async def test_debugging_needs_the_service_token(debugged: MetricsServer, path: str) -> None:
    assert (await _get(debugged.port, path))[0] == 401
    assert (await _get(debugged.port, path, token="old-one\nnew-one"))[0] == 401
    assert (await _get(debugged.port, path, token="wrong"))[0] == 401


async def test_nobody_may_debug_a_service_without_a_service_token() -> None:
    server = MetricsServer(lambda: True, registry=CollectorRegistry())
    await server.start("127.0.0.1:0")
    assert (await _get(server.port, "/debug/stacks"))[0] == 401
    assert (await _get(server.port, "/debug/stacks", token="x"))[0] == 401
    await server.stop()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "61", "many"])
async def test_a_profile_has_a_length(debugged: MetricsServer, seconds: str) -> None:
    status, body = await _get(debugged.port, f"/debug/profile?seconds={seconds}", token="old-one")
    assert (status, body) == (400, "seconds: a number above 0, at most 60\n")


async def test_one_profile_is_taken_at_a_time(debugged: MetricsServer) -> None:
    answers = await asyncio.gather(
        *(_get(debugged.port, "/debug/profile?seconds=0.3", token="old-one") for _ in range(2))
    )
    assert sorted(status for status, _ in answers) == [200, 409]
