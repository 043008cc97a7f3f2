"""One trace from a client's call to the engine's steps, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex_services.common.telemetry.tracing import ENDPOINTS
from tests.collector import EXPORTING, running_collector, values
from tests.e2e.stack import BASE_ID, DEMO, start

pytestmark = pytest.mark.long
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
PROMPT = "Some private words"
PHASES = ("prepare", "adapter load", "queue", "prefill", "decode")


def test_a_request_is_one_trace_with_the_digest_from_the_gateway_to_the_engines_steps(
    tmp_path: Path,
) -> None:
    with running_collector() as (endpoint, collector):
        stack = start(tmp_path / "state", environment={**EXPORTING, ENDPOINTS[1]: endpoint})
        try:
            stack.publish(DEMO / "adapters" / "upper")
            body = {"model": "upper", "prompt": PROMPT, "max_tokens": 16, "ignore_eos": True}
            status, answer = stack.post("/v1/completions", body, HEADERS)
            assert status == 200
            found = collector.wait_for("gateway request", "worker request", *PHASES)
        finally:
            assert stack.stop() == 0
    services = {name: service for name, (service, _) in found.items()}
    spans = {name: span for name, (_, span) in found.items()}
    gateway, worker = spans["gateway request"], spans["worker request"]
    assert services["gateway request"] == "loraplex-gateway"
    assert {services[name] for name in PHASES[1:]} <= {"loraplex-worker", "loraplex-gateway"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert gateway.parent_span_id.hex() == PARENT_ID and worker.parent_span_id == gateway.span_id
    for name in ("adapter load", "prefill", "decode"):
        assert services[name] == "loraplex-worker" and spans[name].parent_span_id == worker.span_id
    digests = values(gateway.attributes)["loraplex.adapter.digests"]
    assert (
        digests == values(worker.attributes)["loraplex.adapter.digests"]
        and digests[0][:7] == "sha256:"
    )
    first_step, last_step = (
        values(spans[name].attributes)["loraplex.step"] for name in ("prefill", "decode")
    )
    assert 0 < last_step - first_step <= 15, "a step for each token after the first, or for several"
    assert gateway.start_time_unix_nano <= worker.start_time_unix_nano
    assert worker.end_time_unix_nano <= gateway.end_time_unix_nano
    everything = b"".join(collector.exports)
    text = answer["choices"][0]["text"]
    assert PROMPT.encode() not in everything and text.encode() not in everything


def test_requests_and_the_end_do_not_need_the_collector(tmp_path: Path) -> None:
    endpoint = {ENDPOINTS[1]: "http://127.0.0.1:9"}
    stack = start(tmp_path / "state", environment=EXPORTING | endpoint)
    try:
        for _ in range(20):
            stack.complete(BASE_ID, PROMPT)
    finally:
        assert stack.stop() == 0, "a child that does not end in time is killed"
