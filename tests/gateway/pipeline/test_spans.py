"""The spans of a gateway: what came with which trace, what ran, how it ended, and no text."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import openai
import pytest

from loraplex.v1 import inference_pb2, inference_pb2_grpc
from loraplex_services.common.telemetry.tracing import ENDPOINTS, open_tracer
from loraplex_services.gateway.metrics import FIRST_TOKEN_S, REQUEST_S
from tests.collector import EXPORTING, Collector, running_collector, values
from tests.gateway.conftest import Stack
from tests.gateway.scripted_registry import digest_of

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
PROMPT, ANSWER = "a-private-prompt", "replying"


@pytest.fixture
def collector(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Gets the spans of the stack's gateway."""
    with running_collector() as (endpoint, running):
        environ = {**EXPORTING, ENDPOINTS[1]: endpoint}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        stack.tracer = open_tracer("gateway", environ)
        yield running


async def _complete(stack: Stack, model: str = "upper") -> str:
    """The text of a completion that the official client asks for, in the caller's trace."""
    answer = await stack.openai().completions.create(
        model=model, prompt=PROMPT, max_tokens=8, extra_headers=HEADERS
    )
    return answer.choices[0].text


async def test_a_request_over_http_is_a_span_of_its_callers_trace_and_the_workers_parent(
    stack: Stack, collector: Collector
) -> None:
    stack.registry.put("upper")
    await stack.start()
    assert await _complete(stack)
    found = collector.wait_for("prepare", "queue", "gateway request")
    _, span = found["gateway request"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert all(
        part.parent_span_id == span.span_id for _, part in map(found.get, ("prepare", "queue"))
    )
    [request] = stack.workers[0].requests
    assert request.trace == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
    told = values(span.attributes)
    assert told["loraplex.adapter.digests"] == [digest_of("upper", 1)]
    assert told["loraplex.adapter.names"] == ["default/upper:v1"]
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == (
        "text_completion",
        "base",
    )
    assert told["gen_ai.usage.input_tokens"] == 1 + len(PROMPT)
    assert 0 < told["gen_ai.usage.output_tokens"] <= 8
    assert (told["loraplex.tenant"], told["loraplex.outcome"]) == ("default", "ok")


async def test_a_request_over_grpc_is_a_span_of_its_callers_trace(
    stack: Stack, collector: Collector
) -> None:
    await stack.start()
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(model="base", text=PROMPT)
        async for _ in stub.Generate(request, metadata=tuple(HEADERS.items())):
            pass
    _, span = collector.wait_for("gateway request")["gateway request"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    for metric in (FIRST_TOKEN_S, REQUEST_S):
        samples = [sample for family in metric.collect() for sample in family.samples]
        shown = [sample.exemplar.labels for sample in samples if sample.exemplar]
        assert {"trace_id": TRACE_ID} in shown


async def test_a_refused_request_is_an_error_that_does_not_repeat_what_it_named(
    stack: Stack, collector: Collector
) -> None:
    await stack.start()
    with pytest.raises(openai.NotFoundError):
        await _complete(stack, "a-private-name")
    _, span = collector.wait_for("gateway request")["gateway request"]
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert "not_found" in values(span.attributes)["loraplex.outcome"]
    assert not any(b"private" in export for export in collector.exports)


async def test_no_span_contains_text(stack: Stack, collector: Collector) -> None:
    stack.registry.put("upper")
    stack.workers[0].script = lambda request: tuple(ANSWER.encode())
    await stack.start()
    assert await _complete(stack) == ANSWER
    collector.wait_for("gateway request")
    everything = b"".join(collector.exports)
    assert PROMPT.encode() not in everything and ANSWER.encode() not in everything
