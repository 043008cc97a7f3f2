"""Spans reach a collector that speaks OTLP, under the trace that a caller began."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from loraplex_services.common.telemetry.tracing import ENDPOINTS, PROTOCOLS, Tracer, open_tracer
from tests.collector import EXPORTING, Collector, running_collector, values

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with running_collector() as (endpoint, running):
        for name, value in {**EXPORTING, ENDPOINTS[1]: endpoint}.items():
            monkeypatch.setenv(name, value)
        yield running


def opened(collector: Collector, service: str = "gateway") -> Tracer:
    """What a process with the fixture's environment opens."""
    return open_tracer(service, {ENDPOINTS[1]: "http://elsewhere"})


def test_without_an_endpoint_a_traceparent_is_passed_on_and_nothing_is_imported() -> None:
    code = (
        "import sys; from loraplex_services.common.telemetry.tracing import open_tracer;"
        f"span = open_tracer('gateway', {{}}).begin('r', {TRACEPARENT!r}, 0.0);"
        "span.child('c', 0.0, 1.0); span.end(1.0, 'ok', {});"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules);"
        "print(span.traceparent)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == TRACEPARENT


def test_a_span_and_its_parts_continue_the_trace_of_the_caller(collector: Collector) -> None:
    now_s, unix_s = time.monotonic(), time.time()
    span = opened(collector).begin("gateway request", TRACEPARENT, now_s - 2.0)
    span.child("queue", now_s - 2.0, now_s - 0.5, {"loraplex.step": 7})
    span.end(now_s, "ok", {"loraplex.adapter.digests": ["sha256:aa"]})
    found = collector.wait_for("queue", "gateway request")
    (service, whole), (_, part) = found["gateway request"], found["queue"]
    assert service == "loraplex-gateway"
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert (part.trace_id, part.parent_span_id) == (whole.trace_id, whole.span_id)
    assert span.traceparent == f"00-{TRACE_ID}-{whole.span_id.hex()}-01"
    assert whole.end_time_unix_nano / 1e9 == pytest.approx(unix_s, abs=1.0)
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == pytest.approx(2e9, abs=1e6)
    assert part.end_time_unix_nano - part.start_time_unix_nano == pytest.approx(1.5e9, abs=1e6)
    assert values(part.attributes) == {"loraplex.step": 7}
    assert values(whole.attributes) == {
        "loraplex.adapter.digests": ["sha256:aa"],
        "loraplex.outcome": "ok",
    }


@pytest.mark.parametrize("outcome", ["ok", "cancelled", "adapter_damaged"])
def test_only_a_failure_is_an_error(collector: Collector, outcome: str) -> None:
    opened(collector).begin("r", "", 0.0).end(1.0, outcome, {})
    _, span = collector.wait_for("r")["r"]
    assert (span.status.code == span.status.STATUS_CODE_ERROR) == (outcome == "adapter_damaged")


@pytest.mark.parametrize("traceparent", ["", "nonsense", TRACEPARENT.replace("a", "Z"), "00-0-0-0"])
def test_a_malformed_traceparent_begins_a_new_trace(collector: Collector, traceparent: str) -> None:
    opened(collector).begin("r", traceparent, 0.0).end(1.0, "ok", {})
    _, span = collector.wait_for("r")["r"]
    assert not span.parent_span_id and span.trace_id.hex() != TRACE_ID


def test_what_the_caller_does_not_sample_is_not_exported(collector: Collector) -> None:
    tracer = opened(collector)
    unsampled = tracer.begin("unsampled", TRACEPARENT[:-1] + "0", 0.0)
    assert unsampled.traceparent.endswith("-00"), "a worker is not to sample it either"
    unsampled.child("part", 0.0, 1.0)
    unsampled.end(1.0, "ok", {})
    tracer.begin("sampled", TRACEPARENT, 0.0).end(1.0, "ok", {})
    assert set(collector.wait_for("sampled")) == {"sampled"}


def test_operators_name_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "blue")
    opened(collector).begin("r", "", 0.0).end(1.0, "ok", {})
    assert collector.wait_for("r")["r"][0] == "blue"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {ENDPOINTS[0]: ""},
        {ENDPOINTS[0]: "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "True"},
    ],
)
def test_tracing_is_off_unless_asked_for(environ: dict[str, str]) -> None:
    assert type(open_tracer("gateway", environ)) is Tracer


def test_a_protocol_that_is_not_served_is_named_and_traces_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {ENDPOINTS[1]: "http://127.0.0.1:4318", PROTOCOLS[1]: "http/protobuf"}
    with caplog.at_level(logging.WARNING):
        assert type(open_tracer("gateway", environ)) is Tracer
    assert "grpc" in caplog.text
