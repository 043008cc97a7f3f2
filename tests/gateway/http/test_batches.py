"""/v1/batches with the official client: what a batch answers, and how it ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from loraplex.api.error_wire import to_detail
from loraplex.errors import Unavailable
from loraplex.v1 import registry_pb2
from loraplex_services.gateway.batches import book, records, run, runner
from tests.gateway.conftest import Stack, eventually
from tests.gateway.http.test_files import readers, token
from tests.gateway.scripted_worker import answer_of, endless

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
ENDED = ("completed", "cancelled", "expired", "failed")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners renew often, and leases are short."""
    monkeypatch.setattr(run, "RENEW_S", 0.05)
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    monkeypatch.setattr(runner, "LEASE_S", 1.0)


@pytest.fixture
async def storing(stack: Stack) -> AsyncIterator[Stack]:
    """A stack whose gateway has an object store."""
    stack.objects_url = (stack.folder / "objects").as_uri()
    stack.registry.put("upper")
    yield stack


def request(custom_id: str, body: Any, url: str = COMPLETIONS, **fields: Any) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}
    return json.dumps(line).encode()


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "upper", "prompt": prompt, "max_tokens": 64, **fields}


async def created(
    client: AsyncOpenAI, lines: Sequence[bytes], endpoint: Any = COMPLETIONS, **fields: Any
) -> Any:
    file = await client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


async def ended(client: AsyncOpenAI, batch: Any, within_s: float = 30.0) -> Any:
    deadline_s = time.monotonic() + within_s
    while batch.status not in ENDED:
        assert time.monotonic() < deadline_s, batch
        await asyncio.sleep(0.05)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> dict[str | None, Any]:
    """The lines of an output or error file by custom_id."""
    if file_id is None:
        return {}
    content = (await client.files.content(file_id)).content
    lines = [json.loads(line) for line in content.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines) and len({line["id"] for line in lines}) == len(lines)
    return found


def parts_of(answer: Any, name: str) -> list[Any]:
    return [each.get(name) for each in answer.get("choices", [])]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, completion("abc")),
        (CHAT, {"model": "upper", "messages": [{"role": "user", "content": "abc"}]}),
        (RESPONSES, {"model": "upper", "input": "abc"}),
    ],
)
async def test_every_endpoint_answers_as_it_does_directly(
    storing: Stack, endpoint: str, body: dict[str, Any]
) -> None:
    await storing.start()
    client = storing.openai()
    direct: Any = await client.post(f"{storing.url}{endpoint}", body=body, cast_to=object)
    batch = await created(client, [request("a", body, endpoint)], endpoint, metadata={"k": "v"})
    assert batch.status == "validating" and batch.metadata == {"k": "v"}
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = await ended(client, batch)
    assert batch.status == "completed" and batch.error_file_id is None
    assert (batch.request_counts.total, batch.request_counts.completed) == (1, 1)
    [line] = (await lines_of(client, batch.output_file_id)).values()
    assert line["error"] is None and line["response"]["status_code"] == 200
    answer = line["response"]["body"]
    for name in ("usage", "model", "object"):
        assert answer[name] == direct[name]
    for name in ("text", "message", "embedding"):
        if found := [
            each[name] for each in direct.get("choices", direct.get("data", [])) if name in each
        ]:
            assert [each[name] for each in answer.get("choices", answer.get("data"))] == found
    usage = direct["usage"]
    used = usage.get("prompt_tokens", usage.get("input_tokens"))
    assert batch.usage.input_tokens == used and batch.usage.total_tokens == usage["total_tokens"]
    shown = await client.files.retrieve(batch.output_file_id)
    assert shown.purpose == "batch_output" and shown.filename == f"{batch.id}_output.jsonl"


async def test_each_bad_line_is_an_error_of_its_own(storing: Stack) -> None:
    await storing.start()
    client = storing.openai()
    good = completion("abc")
    lines = [
        request("good", good),
        b"{not json",
        b"",
        b"[1]",
        request("", good),
        request("x" * 513, good),
        request("get", good).replace(b"POST", b"GET"),
        request("url", good, CHAT),
        request("body", "text"),
        request("extra", good, priority=3),
        request("good", completion("again")),
        request("model", completion("abc", model="nowhere")),
        request("param", completion("abc", max_tokens=-1)),
        request("stream", completion("abc", stream=True)),
        b" ",
        request("last", good) + b"\r\n",
    ]
    batch = await ended(client, await created(client, lines))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed) == (15, 2)
    assert batch.request_counts.failed == 13
    assert set(await lines_of(client, batch.output_file_id)) == {"good", "last"}
    content = (await client.files.content(batch.error_file_id)).content
    errors = [json.loads(line) for line in content.splitlines()]
    codes = [each["error"]["code"] for each in errors if each["error"]]
    assert codes == [
        *("invalid_json_line", "invalid_json_line", "missing_custom_id", "invalid_custom_id"),
        *("invalid_method", "mismatched_url", "missing_body", "unknown_field"),
        *("duplicate_custom_id", "invalid_json_line"),
    ]
    answers = {each["custom_id"]: each["response"] for each in errors if each["response"]}
    assert {name: each["status_code"] for name, each in answers.items()} == {
        "model": 404,
        "param": 400,
        "stream": 400,
    }
    assert answers["model"]["body"]["error"]["code"] == "model_not_found"
    assert answers["stream"]["body"]["error"]["param"] == "stream"
    assert not any(b"again" in line for line in content.splitlines()), "errors quote no prompts"


async def test_a_file_without_requests_fails(storing: Stack) -> None:
    await storing.start()
    client = storing.openai()
    batch = await ended(client, await created(client, [b"", b"\r", b""]))
    assert batch.status == "failed" and batch.errors.data[0].code == "empty_file"
    assert batch.output_file_id is None and batch.error_file_id is None


async def test_too_many_requests_fail(storing: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_BATCH_LINES", 2)
    await storing.start()
    client = storing.openai()
    batch = await ended(client, await created(client, [b"{}"] * 3))
    assert batch.status == "failed" and batch.errors.data[0].code == "too_many_requests"
    assert storing.workers[0].requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
        ({"extra_body": {"webhook": "x"}}, "webhook"),
    ],
)
async def test_what_no_batch_can_have_is_refused_by_name(
    storing: Stack, fields: Any, param: str
) -> None:
    await storing.start()
    client = storing.openai()
    file = await client.files.create(file=("f", b"{}"), purpose="batch")
    known: Any = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.batches.create(**{**known, **fields})
    assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as missed:
        await client.batches.create(**{**known, "input_file_id": "file-1"})
    assert missed.value.param == "input_file_id"


async def test_a_cancelled_batch_keeps_its_results_and_says_what_it_left_out(
    storing: Stack,
) -> None:
    worker = storing.workers[0]
    await storing.start()
    client = storing.openai()
    worker.step_s = 0.005
    long = completion("abc", ignore_eos=True, max_tokens=500)
    lines = [request("short", completion("abc")), *(request(f"{i}", long) for i in range(40))]
    worker.script = lambda job: (endless if job.sampling.max_tokens > 64 else answer_of)(job)
    batch = await created(client, lines)
    while batch.request_counts is None or batch.request_counts.completed < 1:
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    with pytest.raises(openai.ConflictError, match="reads this file"):
        await client.files.delete(batch.input_file_id)
    batch = await client.batches.cancel(batch.id)
    assert batch.status == "cancelling" and batch.cancelling_at
    batch = await ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at
    outputs = await lines_of(client, batch.output_file_id)
    errors = await lines_of(client, batch.error_file_id)
    assert "short" in outputs and len(outputs) + len(errors) == len(lines)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert batch.request_counts.completed == len(outputs) and batch.request_counts.failed == 0
    await eventually(lambda: worker.num_live == 0)
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    assert (await client.files.delete(batch.input_file_id)).deleted
    assert not list((storing.folder / "objects" / "batches").rglob("results/*/*"))


async def test_an_expired_batch_gives_up_what_has_no_answer(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    storing.workers[0].stands_at = 1
    await storing.start()
    client = storing.openai()
    batch = await created(client, [request("a", completion("abc"))])
    await eventually(lambda: len(storing.workers[0].requests) == 1)
    monkeypatch.setattr(records, "WINDOW_S", -1)
    batch = await ended(client, batch)
    assert batch.status == "expired" and batch.expired_at
    [line] = (await lines_of(client, batch.error_file_id)).values()
    assert line["error"]["code"] == "batch_expired" and line["response"] is None


async def test_tenants_see_only_their_own_and_a_revoked_key_ends_its_batches(
    storing: Stack,
) -> None:
    storing.wants_keys = True
    storing.registry.keys |= readers("default", "theirs")
    storing.workers[0].stands_at = 1
    await storing.start(ready=False)
    await eventually(lambda: storing.running.readiness.missing() == "")
    ours = storing.openai().with_options(api_key=token("default"))
    theirs = storing.openai().with_options(api_key=token("theirs"))
    batch = await created(ours, [request("a", completion("abc"))])
    assert [each.id for each in (await ours.batches.list()).data] == [batch.id]
    assert (await theirs.batches.list()).data == []
    for attempt in (theirs.batches.retrieve, theirs.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await attempt(batch.id)
    with pytest.raises(openai.NotFoundError):
        await theirs.batches.create(
            input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
        )
    await eventually(lambda: len(storing.workers[0].requests) == 1)
    [sent] = storing.workers[0].requests
    assert sent.tenant == "default" and sent.priority == (1 << 31) - 1
    # Another key of the tenant sees what becomes of the batch.
    storing.registry.keys[token("other")] = registry_pb2.Key(
        tenant="default", key_id="other", scopes=["reader"]
    )
    del storing.registry.keys[token("default")]
    batch = await ended(storing.openai().with_options(api_key=token("other")), batch)
    assert batch.status == "failed" and batch.errors.data[0].code == "invalid_api_key"
    await eventually(lambda: storing.workers[0].num_live == 0)


async def test_a_line_that_came_at_a_bad_time_is_sent_again(storing: Stack) -> None:
    await storing.start()
    client = storing.openai()
    storing.workers[0].fail_next = [to_detail(Unavailable("later", retry_after_s=0.1))] * 3
    batch = await ended(client, await created(client, [request("a", completion("abc"))]))
    assert batch.request_counts.completed == 1


async def test_a_tenant_has_few_unfinished_batches(
    storing: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "MAX_UNFINISHED_BATCHES_PER_TENANT", 1)
    storing.workers[0].stands_at = 1
    await storing.start()
    client = storing.openai()
    batch = await created(client, [request("a", completion("abc"))])
    with pytest.raises(openai.RateLimitError) as caught:
        await created(client, [request("a", completion("abc"))])
    assert caught.value.code == "too_many_batches"
    await ended(client, await client.batches.cancel(batch.id))
    storing.workers[0].stands_at = None
    done = await ended(client, await created(client, [request("a", completion("abc"))]))
    listed = [each.id async for each in await client.batches.list(limit=1)]
    assert listed == [done.id, batch.id]


async def test_nothing_of_prompts_is_logged(
    storing: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="loraplex_services")
    await storing.start()
    client = storing.openai()
    lines = [request("id-secret", completion("prompt-secret")), b'{"prompt-secret": ']
    await ended(client, await created(client, lines))
    assert "secret" not in "".join(str(record.__dict__) for record in caplog.records)


async def started_second(stack: Stack) -> Stack:
    """A second gateway on the same neighbours and objects."""
    (stack.folder / "second").mkdir()
    second = Stack(stack.folder / "second", [], gateway_id="g1", objects_url=stack.objects_url)
    second.worker_address = stack.worker_address  # type: ignore[method-assign]
    second.registry_folder = stack.folder
    await second.start_gateway([worker.worker_id for worker in stack.workers])
    await eventually(lambda: second.running.readiness.missing() == "")
    return second


@pytest.mark.long
async def test_another_gateway_finishes_what_a_hung_one_began(storing: Stack) -> None:
    """The first one sends on, and neither repeats nor replaces a result."""
    worker = storing.workers[0]
    await storing.start()
    client = storing.openai()
    first = storing.running._stored
    assert first is not None
    lines = [request(f"{i}", completion(f"p{i}")) for i in range(60)]
    worker.script = lambda job: answer_of(job) if len(worker.requests) <= 20 else endless(job)
    worker.step_s = 0.002
    batch = await created(client, lines)
    while batch.request_counts.completed < 5:
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    [(hung, _)] = first._runner._runs.values()

    # It renews nothing, but sends on. No answer ends before the other gateway has the batch.
    hung._look = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    worker.stands_at = 2
    second = await started_second(storing)
    try:
        while (await first._batches.book.get("default", batch.id)).owner != "g1":
            await asyncio.sleep(0.02)
        worker.stands_at = None
        batch = await ended(second.openai(), batch)
        assert batch.status == "completed" and batch.request_counts.completed == 60
        outputs = await lines_of(second.openai(), batch.output_file_id)
        assert set(outputs) == {f"{i}" for i in range(60)}
        [file] = (await client.files.list(purpose="batch_output")).data
        assert file.id == batch.output_file_id
    finally:
        await second.stop()


async def test_a_gateway_that_drains_leaves_its_batches_to_others(storing: Stack) -> None:
    storing.workers[0].stands_at = 1
    await storing.start()
    batch = await created(storing.openai(), [request("a", completion("abc"))])
    await eventually(lambda: len(storing.workers[0].requests) == 1)
    second = await started_second(storing)
    try:
        await storing.running.drain(0.1)
        storing.workers[0].stands_at = None
        batch = await ended(second.openai(), batch, within_s=10)
        assert batch.request_counts.completed == 1
    finally:
        await second.stop()
