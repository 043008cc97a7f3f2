"""What one tenant sends cannot cut the streams of others, nor multiply into gigabytes."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import openai
import pytest

from loraplex.adapter_format.added_tokens import AddedToken
from loraplex.api.error_wire import from_rpc_error
from loraplex.api.request import WorkerRequest
from loraplex.api.sampling import Sampling, SamplingParams
from loraplex.api.tenants import TenantLimits
from loraplex.errors import InvalidRequest, LoraplexError
from loraplex.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from loraplex_services.common.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_SEQUENCES_PER_REQUEST,
    MAX_TOKEN_IDS_PER_FIELD,
)
from loraplex_services.gateway.pipeline.sampling import resolve
from loraplex_services.gateway.request import ServedModel, WorkerJob
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.text.tokenizer import BaseTokenizer
from loraplex_services.gateway.workers.session import MAX_JOB_BYTES, WorkerSession
from loraplex_services.gateway.workers.token_stream import WakeupPacer
from tests.gateway.conftest import Stack
from tests.gateway.tiny_tokenizer import PAD_ID, tokenizer_files

pytestmark = pytest.mark.hostile

TOO_LONG = "x" * (MAX_CACHE_SALT_CHARS + 1)


class SlowCall:
    """A call whose messages are sent when `is_flowing` is set."""

    def __init__(self) -> None:
        self.sent: list[worker_pb2.SessionRequest] = []
        self.is_flowing = asyncio.Event()
        self._ended = asyncio.Event()

    def Session(self, metadata: Any) -> Any:
        return self

    async def write(self, message: worker_pb2.SessionRequest) -> None:
        await self.is_flowing.wait()
        self.sent.append(message)

    async def read(self) -> Any:
        await self._ended.wait()
        return grpc.aio.EOF

    def cancel(self) -> None:
        self._ended.set()


@pytest.fixture
async def call() -> SlowCall:
    return SlowCall()


@pytest.fixture
async def session(call: SlowCall) -> AsyncIterator[WorkerSession]:
    opened = WorkerSession(call, (), WakeupPacer())  # type: ignore[arg-type]
    opened.is_open = True
    running = asyncio.create_task(opened.run(lambda: None))
    yield opened
    call.cancel()
    with contextlib.suppress(LoraplexError):
        await running


async def _sent(call: SlowCall, count: int) -> list[str]:
    call.is_flowing.set()
    async with asyncio.timeout(10):
        while len(call.sent) < count:
            await asyncio.sleep(0)
    return [message.submit.tenant for message in call.sent]


def _job(tenant: str, salt_bytes: int) -> WorkerJob:
    request = WorkerRequest(
        request_id="r",
        tenant=tenant,
        prompt_ids=(1, 2),
        sampling=SamplingParams(max_tokens=1, seed=0),
        cache_salt="x" * salt_bytes,
    )
    return WorkerJob(request, "base", deadline_s=1e9)


@pytest.mark.parametrize("field", ["cache_salt", "request_id", "split_key", "model"])
async def test_long_text_is_refused_before_any_worker_sees_it(stack: Stack, field: str) -> None:
    await stack.start()
    fields: dict[str, Any] = {"model": "base", "text": "x"} | {field: "x" * 2000}
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            inference_pb2.GenerateRequest(**fields)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == field
    assert stack.workers[0].requests == []


async def test_long_cache_salt_and_too_many_sequences_are_refused_over_http(stack: Stack) -> None:
    await stack.start()
    completions = stack.openai().completions
    with pytest.raises(openai.BadRequestError) as caught:
        await completions.create(model="base", prompt="x", extra_body={"cache_salt": TOO_LONG})
    assert caught.value.param == "cache_salt"
    num_prompts = MAX_SEQUENCES_PER_REQUEST // 128 + 1
    with pytest.raises(openai.BadRequestError) as caught:
        await completions.create(model="base", prompt=["x"] * num_prompts, n=128)
    assert caught.value.param == "n"
    assert stack.workers[0].requests == []


async def test_job_that_no_worker_takes_is_refused_and_the_session_lives(
    session: WorkerSession, call: SlowCall
) -> None:
    large = session.submit(_job("globex", MAX_JOB_BYTES))
    session.submit(_job("acme", 10))
    assert await _sent(call, 1) == ["acme"]
    with pytest.raises(InvalidRequest, match="workers accept at most"):
        await large.next()
    assert session.is_open and session.in_flight == 1


async def test_many_choices_of_a_long_prompt_wait_without_copies_of_it(
    session: WorkerSession, call: SlowCall
) -> None:
    prompt_ids = tuple(range(100_000))
    tracemalloc.start()
    try:
        for index in range(128):
            job = _job("globex", 10)
            request = replace(job.request, prompt_ids=prompt_ids, sample_index=index)
            session.submit(replace(job, request=request))
        await asyncio.sleep(0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20, "128 messages of 300 kB"
    assert await _sent(call, 128) == ["globex"] * 128


async def test_jobs_of_one_tenant_do_not_delay_the_jobs_of_another_on_their_way_to_a_worker(
    session: WorkerSession, call: SlowCall
) -> None:
    for _ in range(50):
        session.submit(_job("globex", 1000))
    await asyncio.sleep(0)
    session.submit(_job("acme", 10))
    assert "acme" in (await _sent(call, 51))[:3]


async def test_jobs_that_were_cancelled_before_they_were_sent_are_not_sent(
    session: WorkerSession, call: SlowCall
) -> None:
    session.submit(_job("globex", 10))
    await asyncio.sleep(0)  # the writer has taken it
    left = session.submit(_job("globex", 10))
    left.cancel()
    session.submit(_job("acme", 10))
    call.is_flowing.set()
    await _sent(call, 3)
    kinds = [message.WhichOneof("message") for message in call.sent]
    assert kinds == ["submit", "cancel", "submit"]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_token_ids"])
def test_repeated_token_ids_reach_workers_once_and_many_are_refused(field: str) -> None:
    base = ServedModel("base", vocab_size=100_000, max_model_len=64)

    def resolved(ids: tuple[int, ...]) -> tuple[int, ...]:
        asked = Sampling(**{field: ids})  # type: ignore[arg-type]
        sampling = resolve(asked, base, 4, fills_context=False, draw_seed=lambda: 0).sampling
        return getattr(sampling, field)  # type: ignore[no-any-return]

    assert resolved((7, 5, 7) * 20_000) == (7, 5)
    assert len(resolved(tuple(range(MAX_TOKEN_IDS_PER_FIELD)))) == MAX_TOKEN_IDS_PER_FIELD
    with pytest.raises(InvalidRequest, match=field):
        resolved(tuple(range(MAX_TOKEN_IDS_PER_FIELD + 1)))


def test_bad_words_of_many_tokens_are_refused_before_each_choice_carries_them() -> None:
    base = ServedModel("base", vocab_size=1 << 17, max_model_len=64)

    def resolved(num_words: int) -> int:
        words = [tuple(range(128))] * num_words
        asked = Sampling(n=128)
        done = resolve(asked, base, 4, words, fills_context=False, draw_seed=lambda: 1)
        return len(done.sampling.bad_sequences)

    assert resolved(MAX_TOKEN_IDS_PER_FIELD // 128) == 32
    with pytest.raises(InvalidRequest, match="bad_words"):
        resolved(MAX_TOKEN_IDS_PER_FIELD // 128 + 1)


async def test_output_is_not_constrained_with_thousands_of_tokens_of_an_adapter(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.start()
    stack.registry.put("many", 1)
    client = stack.openai()

    async def complete(num_tokens: int, **more: Any) -> None:
        base = BaseTokenizer(tokenizer_files(), TemplatePool())
        made = base.with_tokens(
            [AddedToken(PAD_ID + 1 + i, f"<{i:04}>") for i in range(num_tokens)]
        )

        async def tokenizer(*_: Any) -> BaseTokenizer:
            return made

        monkeypatch.setattr(stack.running._adapter_text, "tokenizer", tokenizer)
        await client.completions.create(model="many", prompt="x", extra_body=more)

    await complete(MAX_TOKEN_IDS_PER_FIELD, guided_choice=["a"])
    await complete(MAX_TOKEN_IDS_PER_FIELD + 1)
    with pytest.raises(openai.BadRequestError, match="adds 4097 tokens") as caught:
        await complete(MAX_TOKEN_IDS_PER_FIELD + 1, guided_choice=["a"])
    assert caught.value.param == "guided_choice"


async def test_malformed_logit_bias_is_a_bad_request(stack: Stack) -> None:
    await stack.start()
    for biases in ({"--5": 1}, {"5": 1, "05": 2}):
        with pytest.raises(openai.BadRequestError) as caught:
            await stack.openai().completions.create(
                model="base",
                prompt="x",
                logit_bias=biases,  # type: ignore[arg-type]
            )
        assert caught.value.param == "logit_bias"


async def test_tenant_above_its_rate_is_refused_before_its_text_is_tokenized(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.start()
    limits = TenantLimits("default", requests_per_s=0.001)

    async def limited(tenant: str) -> TenantLimits:
        return limits

    monkeypatch.setattr(stack.running._tenants, "limits", limited)
    client = stack.openai()
    await client.completions.create(model="base", prompt="x")
    tokenized: list[Any] = []

    async def counted(*given: Any) -> tuple[int, ...]:
        tokenized.append(given)
        return (1,)

    monkeypatch.setattr(BaseTokenizer, "encode", counted)
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="base", prompt="x")
    with pytest.raises(openai.RateLimitError):
        body = {"model": "base", "prompt": "x"}
        await client.post(f"{stack.url}/tokenize", body=body, cast_to=object)
    assert tokenized == []
