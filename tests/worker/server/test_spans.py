"""A request's span at a worker: the phases that the engine timed, and the steps that ended them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from loraplex.api.output import FinishReason, Timings
from loraplex_services.common.telemetry.tracing import ENDPOINTS, Tracer, open_tracer
from loraplex_services.worker.server.sessions import GatewaySession, ServerRequest
from loraplex_services.worker.server.spans import end_span
from loraplex_services.worker.types.messages import TokenOutput
from tests.collector import EXPORTING, Collector, running_collector, values

DIGEST = "sha256:" + "ab" * 32
LAST = TokenOutput("r", [3], 2, finish_reason=FinishReason.LENGTH, timings=Timings(0.5, 0.25, 1.0))


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with running_collector() as (endpoint, running):
        for name, value in {**EXPORTING, ENDPOINTS[1]: endpoint}.items():
            monkeypatch.setenv(name, value)
        yield running


def ended(tracer: Tracer, outcome: str, last: TokenOutput | None, *digests: str) -> None:
    """End a request that came three seconds ago and has generated three tokens."""
    now_s = time.monotonic()
    request = ServerRequest(GatewaySession(1, "g"), "r", digests, 7, now_s - 3.0)
    request.span = tracer.begin("worker request", "", request.arrival_s)
    request.first_token_s, request.num_output, request.first_step = now_s - 1.5, 3, 11
    end_span(request, outcome, last, 13)


def test_the_phases_of_a_request_follow_one_another_and_name_their_steps(
    collector: Collector,
) -> None:
    ended(open_tracer("worker", {ENDPOINTS[1]: "x"}), "ok", LAST, DIGEST)
    found = collector.wait_for("worker request", "adapter load", "queue", "prefill", "decode")
    spans = {name: span for name, (_, span) in found.items()}
    root = spans["worker request"]
    begin = root.start_time_unix_nano
    times = {
        name: ((span.start_time_unix_nano - begin) / 1e9, (span.end_time_unix_nano - begin) / 1e9)
        for name, span in spans.items()
    }
    assert times["adapter load"] == pytest.approx((0.0, 0.25), abs=1e-3)
    assert times["queue"] == pytest.approx((0.0, 0.5), abs=1e-3)
    assert times["prefill"] == pytest.approx((0.5, 1.5), abs=1e-3)
    assert times["decode"][0] == pytest.approx(1.5, abs=1e-3)
    assert times["decode"][1] == times["worker request"][1]
    steps = {name: values(spans[name].attributes) for name in ("prefill", "decode")}
    assert steps == {"prefill": {"loraplex.step": 11}, "decode": {"loraplex.step": 13}}
    assert values(root.attributes)["loraplex.adapter.digests"] == [DIGEST]
    assert values(root.attributes)["gen_ai.usage.output_tokens"] == 3


def test_a_request_of_the_base_waits_for_no_adapter(collector: Collector) -> None:
    ended(open_tracer("worker", {ENDPOINTS[1]: "x"}), "ok", LAST)
    assert "adapter load" not in collector.wait_for("worker request", "prefill")


def test_a_request_that_ends_early_has_the_span_of_what_is_known(collector: Collector) -> None:
    ended(open_tracer("worker", {ENDPOINTS[1]: "x"}), "cancelled", None, DIGEST)
    found = collector.wait_for("worker request", "decode")
    assert set(found) == {"worker request", "decode"}
    assert values(found["worker request"][1].attributes)["loraplex.outcome"] == "cancelled"
