"""The gRPC API, called as any client would."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest

from loraplex.api.error_wire import from_rpc_error
from loraplex.client.registry_client import RegistryClient
from loraplex.errors import InvalidRequest, LoraplexError, NotFound, Unsupported
from loraplex.v1 import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    worker_pb2,
)
from loraplex_services.gateway.registry.resolve import model_id
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_registry import digest_of
from tests.gateway.scripted_worker import endless

Stub = inference_pb2_grpc.InferenceServiceStub


@pytest.fixture
async def stub(stack: Stack) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        yield Stub(channel)


async def _generate(stub: Stub, **given: object) -> list[inference_pb2.GenerateResponse]:
    request = inference_pb2.GenerateRequest(**({"model": "base", "text": "abc"} | given))
    return [message async for message in stub.Generate(request)]


async def _refusal(stub: Stub, **fields: object) -> LoraplexError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _generate(stub, **fields)
    return from_rpc_error(caught.value)


async def test_first_message_says_what_ran_and_the_last_what_it_cost(
    stack: Stack, stub: Stub
) -> None:
    stack.registry.put("upper")
    await stack.start()
    sampling = inference_pb2.SamplingParams(max_tokens=64)
    messages = await _generate(stub, model="upper", sampling=sampling)
    assert list(messages[0].served_by.adapters) == ["default/upper:v1"]
    assert list(messages[0].served_by.digests) == [digest_of("upper", 1)]
    assert (messages[0].served_by.worker_id, messages[0].served_by.base_id) == ("w0", "base")
    assert list(messages[0].prompt_token_ids) == [256, *b"abc"]
    assert messages[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert messages[-1].usage.prompt_tokens == 4
    num_ids = sum(len(message.token_ids) for message in messages)
    assert messages[-1].usage.completion_tokens == num_ids
    assert messages[-1].timings.queue_s > 0
    assert "".join(message.text for message in messages).endswith("é€😀")
    assert not any(message.HasField("usage") for message in messages[:-1])


async def test_each_choice_is_complete(stack: Stack, stub: Stub) -> None:
    await stack.start()
    sampling = inference_pb2.SamplingParams(n=3, max_tokens=5)
    messages = await _generate(stub, sampling=sampling)
    texts = ["".join(m.text for m in messages if m.index == index) for index in range(3)]
    assert texts == [" base", " base", " base"]
    firsts = [next(m for m in messages if m.index == index) for index in range(3)]
    assert all(first.HasField("served_by") for first in firsts)
    assert [m.finish_reason for m in messages if m.finish_reason] == [
        common_pb2.FINISH_REASON_LENGTH
    ] * 3


async def test_stop_string_is_the_reason(stack: Stack, stub: Stub) -> None:
    stack.workers[0].script = endless
    await stack.start()
    sampling = inference_pb2.SamplingParams(
        max_tokens=64, stop=["cd", "bcd"], include_stop_str_in_output=True
    )
    messages = await _generate(stub, sampling=sampling)
    assert "".join(message.text for message in messages) == "abcd"
    assert messages[-1].stop_reason == "bcd"
    assert messages[-1].usage.completion_tokens == 4


async def test_prompt_logprobs_come_with_the_first_message(stack: Stack, stub: Stub) -> None:
    await stack.start()
    sampling = inference_pb2.SamplingParams(prompt_logprobs=1, logprobs=0, max_tokens=2)
    messages = await _generate(stub, sampling=sampling)
    assert len(messages[0].prompt_logprobs) == 4
    assert not messages[0].prompt_logprobs[0].HasField("token")
    assert messages[0].prompt_logprobs[1].token.token_id == ord("a")
    assert len(messages[0].logprobs) == len(messages[0].token_ids)


async def test_chat_and_ids_are_prompts_too(stack: Stack, stub: Stub) -> None:
    await stack.start()
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    await _generate(stub, text=None, chat=chat)
    await _generate(stub, text=None, token_ids=inference_pb2.TokenIds(ids=[1, 2]))
    sent = [list(request.prompt_ids) for request in stack.workers[0].requests]
    assert sent == [[*b"[user]hi[assistant]"], [1, 2]]


async def test_refusals_are_typed(stack: Stack, stub: Stub) -> None:
    await stack.start()
    assert isinstance(await _refusal(stub, model="nobody"), NotFound)
    error = await _refusal(stub, sampling=inference_pb2.SamplingParams(top_p=2))
    assert isinstance(error, InvalidRequest)
    assert [(v.field, v.value) for v in error.violations] == [("top_p", "2.0")]
    formless = inference_pb2.SamplingParams(grammar=common_pb2.Grammar())
    error = await _refusal(stub, sampling=formless)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "grammar"
    error = await _refusal(stub, on_update=9)
    assert isinstance(error, Unsupported)
    assert error.violations[0].field == "on_update"
    assert (await _refusal(stub, text=None)).violations[0].field == "prompt"
    assert (await _refusal(stub, text=None, chat={})).violations[0].field == "messages"


async def test_only_adapters_with_a_head_score(stack: Stack, stub: Stub) -> None:
    await stack.start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Score(inference_pb2.ScoreRequest(model="base", inputs=["a"]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(caught.value).violations[0].field == "model"


async def test_cancelled_call_frees_the_worker(stack: Stack, stub: Stub) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.01
    await stack.start()
    request = inference_pb2.GenerateRequest(
        model="base", text="x", sampling=inference_pb2.SamplingParams(max_tokens=400)
    )
    call = stub.Generate(request)
    await call.read()
    call.cancel()
    await eventually(lambda: len(stack.workers[0].cancelled) == 1)
    await eventually(lambda: stack.workers[0].num_live == 0)


async def test_clients_deadline_reaches_the_worker(stack: Stack, stub: Stub) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.05
    await stack.start()
    request = inference_pb2.GenerateRequest(
        model="base", text="x", sampling=inference_pb2.SamplingParams(max_tokens=400)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request, timeout=2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # gRPC rounds time-outs up on the wire.
    assert 0 < stack.workers[0].requests[0].remaining_s <= 2.1
    await eventually(lambda: len(stack.workers[0].cancelled) == 1)
    await eventually(lambda: stack.workers[0].num_live == 0)


async def test_the_moment_of_the_first_token_reaches_the_worker(stack: Stack, stub: Stub) -> None:
    await stack.start()
    request = inference_pb2.GenerateRequest(model="base", text="x", first_token_s=3.0)
    async for _ in stub.Generate(request):
        pass
    async for _ in stub.Generate(inference_pb2.GenerateRequest(model="base", text="x")):
        pass
    first, second = stack.workers[0].requests
    assert 0 < first.remaining_first_token_s <= 3.0
    assert first.remaining_s > 3.0
    assert second.remaining_first_token_s == 0.0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(
            inference_pb2.GenerateRequest(model="base", text="x", first_token_s=-1.0)
        ):
            pass
    assert from_rpc_error(caught.value).violations[0].field == "first_token_s"


async def test_draining_gateway_finishes_what_runs_and_refuses_the_rest(
    stack: Stack, stub: Stub
) -> None:
    stack.workers[0].script = endless
    stack.workers[0].step_s = 0.01
    await stack.start()
    sampling = inference_pb2.SamplingParams(max_tokens=50)
    request = inference_pb2.GenerateRequest(model="base", text="x", sampling=sampling)
    call = stub.Generate(request)
    messages = [await call.read()]
    await stack.running.drain(1.0)
    assert (await _refusal(stub)).reason == "DRAINING"
    assert stack.running.readiness.missing() == "draining"
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    assert sum(len(message.token_ids) for message in messages) == 50


async def test_models_page(stack: Stack, stub: Stub) -> None:
    for name in ("a", "b"):
        stack.registry.put(name)
    await stack.start()
    page = await stub.ListModels(inference_pb2.ListModelsRequest(page_size=2))
    assert [(m.id, m.base_id) for m in page.models] == [("base", "base"), ("a", "base")]
    rest = await stub.ListModels(
        inference_pb2.ListModelsRequest(page_size=2, page_token=page.next_page_token)
    )
    assert [model.id for model in rest.models] == ["b"]
    assert rest.next_page_token == ""


async def test_models_are_paged_though_the_last_one_of_a_page_is_deleted(
    stack: Stack, stub: Stub
) -> None:
    public = registry_pb2.VISIBILITY_PUBLIC
    for name, tenant in (("a", "default"), ("C", "default"), ("b", "default"), ("a", "other")):
        stack.registry.put(name, tenant=tenant, visibility=public)
    await stack.start()
    snapshot, found, token = stack.running._resolver.snapshot, list[str](), ""
    while True:
        request = inference_pb2.ListModelsRequest(page_size=1, page_token=token)
        page = await stub.ListModels(request)
        found += [model.id for model in page.models]
        token = page.next_page_token
        if not token:
            break
        for version in list(snapshot.latest("default")):
            if model_id(version, "default") == token:
                snapshot.put_version(dataclasses.replace(version, deleted=True))
    assert found == ["base", "a", "b", "C", "other/a"]


async def test_status_names_what_is_resident(stack: Stack) -> None:
    stack.registry.put("upper")
    await stack.start()
    stack.workers[0].publish(
        worker_pb2.AdapterResidency(
            digest=digest_of("upper", 1), tier=worker_pb2.ADAPTER_TIER_DEVICE, max_rank=8
        )
    )
    status = await stack.status()
    while not status.workers[0].adapters:
        status = await stack.status()
    assert status.ready
    assert status.registry_connected
    assert list(status.base_ids) == ["base"]
    assert status.num_adapters == 1
    assert status.workers[0].num_adapters_on_device == 1
    assert (status.workers[0].dtype, status.workers[0].kernels) == ("float32", "torch")
    assert status.workers[0].adapters[0].ref == "default/upper:v1"
    assert status.workers[0].adapters[0].residency.tier == worker_pb2.ADAPTER_TIER_DEVICE


async def test_a_client_of_another_server_is_told_so(stack: Stack) -> None:
    await stack.start()
    async with RegistryClient(stack.grpc_address) as client:
        with pytest.raises(Unsupported, match="is it a registry"):
            await client.get("upper")
