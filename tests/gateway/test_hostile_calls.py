"""What one tenant sends cannot cut the streams of others, nor multiply into gigabytes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import openai
import pytest

from loraplex.api.error_wire import from_rpc_error
from loraplex.api.sampling import Sampling, SamplingParams
from loraplex.errors import InvalidRequest, ResourceExhausted
from loraplex.v1 import inference_pb2, inference_pb2_grpc
from loraplex_services.common.limits import (
    MAX_CACHE_SALT_CHARS,
    MAX_QUEUED_JOB_BYTES_PER_TENANT,
    MAX_SEQUENCES_PER_REQUEST,
    MAX_TOKEN_IDS_PER_FIELD,
)
from loraplex_services.gateway.pipeline.sampling import resolve
from loraplex_services.gateway.registry.tenants import TenantLimits
from loraplex_services.gateway.request import ServedModel, WorkerJob
from loraplex_services.gateway.text.tokenizer import BaseTokenizer
from loraplex_services.gateway.workers.session import MAX_JOB_BYTES, WorkerSession
from loraplex_services.gateway.workers.token_stream import WakeupPacer
from tests.gateway.conftest import Stack

pytestmark = pytest.mark.hostile

TOO_LONG = "x" * (MAX_CACHE_SALT_CHARS + 1)


class SilentStub:
    """Opens a call that is never written to."""

    def Session(self, metadata: Any) -> Any:
        return None


def _open_session() -> WorkerSession:
    session = WorkerSession(SilentStub(), (), WakeupPacer())  # type: ignore[arg-type]
    session.is_open = True
    return session


def _job(tenant: str, salt_bytes: int) -> WorkerJob:
    return WorkerJob(
        request_id="r",
        tenant=tenant,
        base_id="base",
        prompt_ids=(1, 2),
        adapters=(),
        sampling=SamplingParams(max_tokens=1, seed=0),
        sample_index=0,
        deadline_s=1e9,
        cache_salt="x" * salt_bytes,
    )


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


async def test_job_that_no_worker_takes_is_refused_and_the_session_lives() -> None:
    session = _open_session()
    with pytest.raises(InvalidRequest, match="workers accept at most"):
        session.submit(_job("globex", MAX_JOB_BYTES))
    assert session.is_open and session.in_flight == 0
    session.submit(_job("acme", 10))
    assert session.in_flight == 1


async def test_bytes_of_one_tenant_that_wait_for_a_worker_are_bounded() -> None:
    session = _open_session()
    num_bytes = MAX_JOB_BYTES // 2
    for _ in range(MAX_QUEUED_JOB_BYTES_PER_TENANT // MAX_JOB_BYTES * 2 - 1):
        session.submit(_job("globex", num_bytes))
    in_flight = session.in_flight
    with pytest.raises(ResourceExhausted, match="retry later"):
        session.submit(_job("globex", num_bytes))
    assert session.in_flight == in_flight
    session.submit(_job("acme", num_bytes))


async def test_bytes_sent_count_no_longer(stack: Stack) -> None:
    await stack.start()
    answers = [stack.openai().completions.create(model="base", prompt="x") for _ in range(8)]
    await asyncio.gather(*answers)
    [session] = [link._session for link, _ in stack.running._fleet._links.values()]
    assert session is not None and not session._queued_bytes


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
