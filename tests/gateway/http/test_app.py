"""What the official client does not show: bytes of streams, headers, refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from loraplex.api.error_wire import to_detail
from loraplex.errors import AlreadyExists, InvalidRequest
from loraplex.v1 import common_pb2, registry_pb2
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.http import sse
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_registry import digest_of
from tests.gateway.scripted_worker import endless
from tests.gateway.tiny_tokenizer import BOS_ID

BODY = {"model": "base", "prompt": "abc", "max_tokens": 8}


async def _send(
    stack: Stack,
    path: str = "/v1/completions",
    body: object = BODY,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    raw: bytes | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """One request over a plain socket: status, headers, body."""
    port = stack.running.http_port
    data = json.dumps(body).encode() if raw is None else raw
    sent = {
        "host": f"127.0.0.1:{port}",
        "content-type": "application/json",
        "content-length": str(len(data)),
        "connection": "close",
    } | (headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items() if value)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    start, _, rest = answer.partition(b"\r\n\r\n")
    lines = start.decode().split("\r\n")
    got = dict(line.lower().split(": ", 1) for line in lines[1:])
    if got.get("transfer-encoding") == "chunked":
        rest = _unchunked(rest)
    return int(lines[0].split()[1]), got, rest


def _unchunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        out += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return out


def _error(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_headers_say_what_ran_and_echo_the_request_id(stack: Stack) -> None:
    stack.registry.put("upper", 3)
    await stack.start()
    _, headers, _ = await _send(
        stack, body=BODY | {"model": "upper"}, headers={"x-request-id": "mine-1"}
    )
    assert headers["x-request-id"] == "mine-1"
    assert headers["x-loraplex-adapter"] == "default/upper:v3"
    assert headers["x-loraplex-digest"] == digest_of("upper", 3)
    _, headers, _ = await _send(stack, headers={"x-request-id": "bad id\x01"})
    assert len(headers["x-request-id"]) == 24
    assert "x-loraplex-adapter" not in headers


async def test_stream_is_events_and_ends_with_done(stack: Stack) -> None:
    await stack.start()
    status, headers, body = await _send(stack, body=BODY | {"stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


async def test_error_before_the_first_byte_keeps_its_status(stack: Stack) -> None:
    await stack.start()
    stack.workers[0].fail_next = [common_pb2.ErrorDetail(code=15, reason="DATA_LOSS", message="m")]
    status, headers, body = await _send(stack, body=BODY | {"stream": True})
    assert status == 502
    assert headers["content-type"] == "application/json"
    assert _error(body)["code"] == "data_loss"


async def test_error_after_the_first_byte_is_one_event_without_done(stack: Stack) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.05
    stack.max_request_s = 1.5
    await stack.start()
    status, _, body = await _send(stack, body=BODY | {"stream": True, "max_tokens": 400})
    assert status == 200
    events = body.decode().strip().split("\n\n")
    assert _error(events[-1].removeprefix("data: ").encode())["code"] == "deadline_exceeded"
    assert len(events) > 1
    assert b"[DONE]" not in body


async def test_waiting_streams_carry_comments(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "COMMENT_INTERVAL_S", 0.05)
    stack.workers[0].step_s = 0.3
    await stack.start()
    status, _, body = await _send(stack, body=BODY | {"stream": True, "max_tokens": 2})
    assert status == 200
    assert body.startswith(b": waiting\n\n")
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"headers": {"content-type": "text/plain"}}, 400),
        ({"headers": {"content-type": ""}}, 400),
        ({"raw": b"{"}, 400),
        ({"raw": b"[]"}, 400),
        ({"raw": b"[" * 100_000}, 400),
        ({"raw": b'{"model": "base", "prompt": "\\ud800"}'}, 400),
        ({"raw": b'{"model": "base", "prompt": "x", "temperature": NaN}'}, 400),
        ({"headers": {"content-length": str(9 << 20)}}, 400),
        ({"headers": {"host": "evil.example"}}, 403),
        ({"path": "/v1/nothing"}, 404),
        ({"method": "GET"}, 405),
        ({"path": "/v1/embeddings"}, 400),
        ({"path": "/v1/models?limit=0", "method": "GET"}, 400),
        ({"path": "/v1/models?after=nobody", "method": "GET"}, 400),
        ({"path": "/v1/models?before=nobody", "method": "GET"}, 400),
        ({"path": "/v1/models?before=base&after=base", "method": "GET"}, 400),
    ],
    ids=str,
)
async def test_refusals_are_error_objects(
    stack: Stack, changes: dict[str, Any], status: int
) -> None:
    await stack.start()
    got, _, body = await _send(stack, **changes)
    assert got == status
    assert _error(body)["message"]
    assert stack.workers[0].requests == []


async def test_body_without_declared_size_is_capped_too(stack: Stack) -> None:
    await stack.start()
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    status, _, body = await _send(
        stack,
        headers={"content-length": "", "transfer-encoding": "chunked"},
        raw=chunk * 130 + b"0\r\n\r\n",
    )
    assert status == 400
    assert _error(body)["code"] == "body_too_large"


async def test_models_page_by_limit_and_after(stack: Stack) -> None:
    for name in ("a", "b", "c"):
        stack.registry.put(name)
    await stack.start()
    _, _, body = await _send(stack, "/v1/models?limit=2", method="GET")
    page = json.loads(body)
    assert [model["id"] for model in page["data"]] == ["base", "a"]
    assert page["has_more"] is True
    _, _, body = await _send(stack, f"/v1/models?after={page['last_id']}", method="GET")
    assert [model["id"] for model in json.loads(body)["data"]] == ["b", "c"]


async def test_models_page_backwards_by_before(stack: Stack) -> None:
    for name in "abcd":
        stack.registry.put(name)
    await stack.start()
    complete = json.loads((await _send(stack, "/v1/models", method="GET"))[2])
    ids = [entry["id"] for entry in complete["data"]]
    assert not complete["has_more"]
    seen: list[str] = []
    before, more = ids[-1], True
    while more:
        path = f"/v1/models?limit=2&before={before}"
        page = json.loads((await _send(stack, path, method="GET"))[2])
        seen = [entry["id"] for entry in page["data"]] + seen
        before, more = page["first_id"], page["has_more"]
    assert seen == ids[:-1]


async def test_add_special_tokens_says_whether_bos_is_added(stack: Stack) -> None:
    await stack.start()
    messages = [{"role": "user", "content": "hi"}]
    for value, text_adds, chat_adds in [(None, True, False), (True, True, True), (False,) * 3]:
        for path, prompt, adds in [
            ("/v1/completions", {"prompt": "abc"}, text_adds),
            ("/v1/completions", {"prompt": ["abc"]}, text_adds),
            ("/v1/completions", {"prompt": [97, 98]}, False),
            ("/v1/chat/completions", {"messages": messages}, chat_adds),
        ]:
            body = {"model": "base", "max_tokens": 2, "add_special_tokens": value, **prompt}
            status, _, answer = await _send(stack, path, body)
            assert status == 200, answer
            assert (stack.workers[0].requests[-1].prompt_ids[0] == BOS_ID) is adds, body
    status, _, answer = await _send(stack, body=BODY | {"add_special_tokens": "yes"})
    assert (status, _error(answer)["param"]) == (400, "add_special_tokens")


async def test_probes_and_metrics(stack: Stack) -> None:
    stack.workers[0].queued_tokens = 7
    await stack.start()
    for path in ("/healthz", "/health", "/readyz", "/metrics"):
        status, _, body = await _send(stack, path, method="GET")
        assert status == 200
    assert b'loraplex_gateway_ready_workers{base="base"} 1.0' in body
    assert b'loraplex_gateway_queued_tokens{base="base"} 7.0' in body
    await stack.stop_server(stack.workers[0].worker_id)
    while b'loraplex_gateway_ready_workers{base="base"} 0.0' not in body:
        assert status == 200
        await asyncio.sleep(0.01)
        status, _, body = await _send(stack, "/metrics", method="GET")
    assert b'loraplex_gateway_queued_tokens{base="base"} 0.0' in body
    assert b'loraplex_gateway_estimated_wait_seconds{base="base"} ' in body


async def test_not_ready_until_the_registry_accepted_the_base(stack: Stack) -> None:
    stack.registry.refuses_bases = AlreadyExists("base exists with another fingerprint")
    await stack.start(ready=False)
    await eventually(lambda: "fingerprint" in stack.running.readiness.missing())
    status, _, body = await _send(stack, "/readyz", method="GET")
    assert status == 503
    assert b"fingerprint" in body
    stack.registry.refuses_bases = None
    await eventually(lambda: stack.running.readiness.missing() == "")
    [base] = stack.registry.bases
    assert (base.base_id, base.aliases) == ("base", ["org/base"])


async def test_an_unknown_adapter_of_several_is_named(stack: Stack) -> None:
    await stack.start()
    status, _, body = await _send(stack, body=BODY | {"adapters": [{"ref": "no-such"}]})
    error = _error(body)
    assert (status, error["param"]) == (404, "adapters[0].ref")
    assert error["code"] == "model_not_found" and "no-such" in error["message"]


async def test_adapters_and_scale_reach_the_worker(stack: Stack) -> None:
    for name in ("a", "b"):
        stack.registry.put(name)
    await stack.start()
    adapters = [{"ref": "b", "weight": 0.5}, {"ref": "a"}]
    await _send(stack, body=BODY | {"adapters": adapters, "lora_scale": 2})
    sent = {a.digest: a.weight for a in stack.workers[0].requests[0].adapters}
    assert sent == {digest_of("a", 1): 2.0, digest_of("b", 1): 1.0}


async def test_first_token_s_is_a_field_of_the_body(stack: Stack) -> None:
    await stack.start()
    await _send(stack, body=BODY | {"first_token_s": 2.5})
    assert 0 < stack.workers[0].requests[0].remaining_first_token_s <= 2.5
    status, _, body = await _send(stack, body=BODY | {"first_token_s": 0})
    assert status == 400 and _error(body)["param"] == "first_token_s"


async def test_token_ids_stream_with_every_chunk(stack: Stack) -> None:
    await stack.start()
    fields = {"stream": True, "return_token_ids": True, "prompt": [97], "stop": ["never"]}
    _, _, body = await _send(stack, body=BODY | fields)
    chunks = [json.loads(e[6:]) for e in body.decode().split("\n\n") if e.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [i for choice in choices for i in choice["token_ids"]] == [*b" base#0:"]
    assert choices[0]["prompt_token_ids"] == [97]
    assert "prompt_token_ids" not in choices[-1]


async def test_moved_tag_is_used_by_new_requests(stack: Stack) -> None:
    stack.registry.put("upper", 1)
    stack.registry.put("upper", 2)
    await stack.start()
    stack.registry.tag("upper", "prod", {1: 1})
    await _send(stack, body=BODY | {"model": "upper:prod"})
    stack.registry.tag("upper", "prod", {2: 1})
    used = {digest_of("upper", 1)}
    while digest_of("upper", 2) not in used:
        await _send(stack, body=BODY | {"model": "upper:prod"})
        used = {request.adapters[0].digest for request in stack.workers[0].requests}
    assert used == {digest_of("upper", 1), digest_of("upper", 2)}


async def test_upload_nobody_announced_is_usable_at_once(stack: Stack) -> None:
    await stack.start()
    stack.registry.put("fresh", announce=False)
    status, _, _ = await _send(stack, body=BODY | {"model": "fresh"})
    assert status == 200
    assert stack.registry.num_lookups == 1


async def test_serving_goes_on_without_the_registry(stack: Stack) -> None:
    stack.registry.put("upper")
    await stack.start()
    await stack.stop_server("registry")
    assert (await _send(stack, body=BODY | {"model": "upper"}))[0] == 200
    status, headers, body = await _send(stack, body=BODY | {"model": "unheard-of"})
    assert status == 503
    assert headers["retry-after"] == "1"
    assert _error(body)["code"] == "registry_unavailable"


@pytest.mark.parametrize("name", ["user", "prompt_cache_key"])
async def test_a_split_key_that_is_too_long_is_named_as_it_was_sent(
    stack: Stack, name: str
) -> None:
    await stack.start()
    status, _, body = await _send(stack, body=BODY | {name: 1025 * "x"})
    assert (status, _error(body)["param"]) == (400, name)


async def test_split_key_header_chooses_the_side(stack: Stack) -> None:
    stack.registry.put("upper", 1)
    stack.registry.put("upper", 2)
    stack.registry.tag("upper", "prod", {1: 1, 2: 1})
    await stack.start()
    seen = set()
    for key in map(str, range(12)):
        answers = [
            await _send(
                stack,
                body=BODY | {"model": "upper:prod"},
                headers={"x-loraplex-split-key": key},
            )
            for _ in range(2)
        ]
        labels = {headers["x-loraplex-adapter"] for _, headers, _ in answers}
        assert len(labels) == 1
        seen |= labels
    assert seen == {"default/upper:v1", "default/upper:v2"}


async def test_request_beyond_the_queue_is_429_with_a_hint(stack: Stack) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.02
    stack.admission = AdmissionLimits(max_running=1, max_waiting=0)
    await stack.start()
    running = asyncio.create_task(_send(stack, body=BODY | {"max_tokens": 50}))
    await eventually(lambda: stack.workers[0].num_live == 1)
    status, headers, body = await _send(stack)
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert _error(body)["type"] == "rate_limit_error"
    assert (await running)[0] == 200


async def test_tenant_over_its_rate_gets_429_with_reason_and_hint(stack: Stack) -> None:
    stack.registry.tenants["default"] = registry_pb2.Tenant(
        tenant="default", tokens_per_s=20.0, fairness_weight=3.0
    )
    await stack.start()
    status, _, _ = await _send(stack, body=BODY | {"max_tokens": 30})
    assert status == 200
    assert stack.workers[0].requests[-1].fairness_weight == 3.0
    status, headers, body = await _send(stack, body=BODY | {"max_tokens": 30})
    assert status == 429
    assert _error(body)["code"] == "tenant_tokens_per_s"
    assert int(headers["retry-after"]) >= 1
    assert len(stack.workers[0].requests) == 1


async def test_paths_that_clients_know_say_what_to_do_instead(stack: Stack) -> None:
    import anthropic  # thousands of modules, for the process that runs this alone

    await stack.start()
    with pytest.raises(openai.NotFoundError) as caught:
        await stack.openai().batches.list()
    assert "/v1/batches is not served" in caught.value.message
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none") as client:
        with pytest.raises(anthropic.NotFoundError) as missed:
            await client.messages.batches.retrieve("msgbatch_1")
    body: Any = missed.value.body
    assert body["error"]["type"] == "not_found_error"
    assert "use /v1/batches" in body["error"]["message"]


async def test_a_refusal_of_a_worker_names_the_adapter_as_the_caller_does(stack: Stack) -> None:
    digest = stack.registry.put("sql").digest
    refusal = InvalidRequest.field("adapters", digest, f"{digest} cannot be combined")
    stack.workers[0].fail_next = [to_detail(refusal)]
    await stack.start()
    status, _, body = await _send(stack, body=BODY | {"model": "sql"})
    assert status == 400
    assert _error(body)["message"] == "adapters: default/sql:v1 cannot be combined"
