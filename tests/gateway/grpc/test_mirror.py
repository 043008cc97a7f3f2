"""What a gateway shows of ended requests, and to whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx2 as httpx
import pytest

from loraplex.api.request import GenerateRequest, TokenPrompt
from loraplex.api.sampling import Grammar, Sampling
from loraplex.client.generation import Mirrored
from loraplex.client.inference_client import InferenceClient
from loraplex.client.settings import Credentials
from loraplex.errors import AdapterNotFound, InvalidRequest, PermissionDenied, Unavailable
from loraplex.refs import parse_ref
from loraplex.v1 import registry_pb2
from loraplex_services.common.limits import MAX_MIRRORED_TOKENS
from loraplex_services.gateway.pipeline.mirror import Mirror, MirroredRequest
from tests.gateway.conftest import Stack, eventually

KEYS = {
    "acme": "lpx_acmeadm1_" + "a" * 43,
    "rival": "lpx_rivaladm_" + "b" * 43,
    "reader": "lpx_acmeread_" + "c" * 43,
}


@contextlib.asynccontextmanager
async def mirror(
    stack: Stack, ref: str, key: str = "", share: float = 1.0
) -> AsyncIterator[list[Mirrored]]:
    """What is mirrored while the context is open."""
    seen: list[Mirrored] = []
    mirrors = stack.running._generation.mirrors

    async def read() -> None:
        async with InferenceClient(stack.grpc_address, Credentials(key)) as client:
            async for mirrored in client.mirrored(ref, share):
                seen.append(mirrored)

    reading = asyncio.create_task(read())
    await eventually(lambda: bool(mirrors._open) or reading.done())
    try:
        yield seen
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


async def test_ended_requests_for_the_tag_are_shown_with_what_repeats_them(stack: Stack) -> None:
    stack.registry.put("sql")
    await stack.start()
    async with mirror(stack, "sql:latest") as seen, InferenceClient(stack.grpc_address) as client:
        sampling = Sampling(max_tokens=5, temperature=0.5, logprobs=1)
        answer = await client.complete("sql", [1, 2, 3], sampling)
        await eventually(lambda: bool(seen))
    (mirrored,) = seen
    (choice,) = answer.choices
    assert mirrored.prompt_ids == (1, 2, 3)
    assert (mirrored.token_ids, mirrored.text) == (choice.token_ids, choice.text)
    assert choice.served_by is not None and mirrored.digest == choice.served_by.digests[0]
    assert mirrored.sampling.max_tokens == 5 and mirrored.sampling.temperature == 0.5
    assert mirrored.sampling.seed is not None and mirrored.sampling.logprobs is None


async def test_other_models_several_choices_and_combinations_are_left_out(stack: Stack) -> None:
    for name in ("sql", "upper"):
        stack.registry.put(name)
    await stack.start()
    async with mirror(stack, "sql:latest") as seen, InferenceClient(stack.grpc_address) as client:
        await client.complete("upper", [1])
        await client.complete("base", [2])
        await client.complete("sql:v1", [3])
        await client.complete("sql", [4], Sampling(n=2))
        await client.complete("base", [5], adapters={"sql": 1.0})
        await client.complete("sql", [6])
        await eventually(lambda: bool(seen))
    assert [mirrored.prompt_ids for mirrored in seen] == [(6,)]


async def test_a_reader_who_does_not_read_is_sent_no_more_than_the_limit(stack: Stack) -> None:
    stack.registry.put("sql")
    await stack.start()
    mirrors = stack.running._generation.mirrors
    with mirrors.opened("default", parse_ref("sql"), 1.0) as opened:
        async with InferenceClient(stack.grpc_address) as client:
            await client.complete("sql", [1])
        one = await opened.next()
        for _ in range(MAX_MIRRORED_TOKENS):
            opened.offer(one)
        waiting = opened._waiting.qsize()
    assert 0 < waiting * one.num_tokens <= MAX_MIRRORED_TOKENS
    assert not mirrors._open


@pytest.mark.hostile
def test_the_parameters_of_mirrored_requests_count_as_tokens() -> None:
    sampling = Sampling(grammar=Grammar(regex="x" * 100_000), max_tokens=1)
    request = GenerateRequest(model="", prompt=TokenPrompt((1,)), sampling=sampling)
    mirror = Mirror(parse_ref("sql:latest", "acme"), 1.0)
    for _ in range(100):
        mirror.offer(MirroredRequest(request, "a", (2,), "b", "sha256:0"))
    assert mirror._waiting.qsize() == 2


@pytest.mark.hostile
async def test_only_admins_see_requests_and_only_those_of_their_tenant(stack: Stack) -> None:
    stack.wants_keys = True
    for who, key in KEYS.items():
        tenant, scope = ("acme", "reader") if who == "reader" else (who, "admin")
        stack.registry.keys[key] = registry_pb2.Key(key_id=who, tenant=tenant, scopes=[scope])
    stack.registry.put("sql", tenant="acme", visibility=registry_pb2.VISIBILITY_PUBLIC)
    await stack.start(ready=False)
    await eventually(lambda: stack.running.readiness.missing() == "")

    async def ask(who: str, prompt: int) -> None:
        async with httpx.AsyncClient(base_url=stack.url) as client:
            body = {"model": "acme/sql", "prompt": [prompt], "max_tokens": 2}
            headers = {"authorization": f"Bearer {KEYS[who]}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text

    with pytest.raises(PermissionDenied):
        async with mirror(stack, "acme/sql:latest", KEYS["reader"]):
            pass
    async with (
        mirror(stack, "acme/sql:latest", KEYS["acme"]) as owners,
        mirror(stack, "acme/sql:latest", KEYS["rival"]) as rivals,
    ):
        await ask("rival", 1)
        await ask("reader", 2)
        await ask("rival", 3)
        await eventually(lambda: bool(owners) and len(rivals) == 2)
    assert [mirrored.prompt_ids for mirrored in owners] == [(2,)]
    assert [mirrored.prompt_ids for mirrored in rivals] == [(1,), (3,)]


@pytest.mark.parametrize(
    ("ref", "share", "error"),
    [
        ("sql:v1", 1.0, InvalidRequest),
        ("nosuch:latest", 1.0, AdapterNotFound),
        ("sql:latest", 0.0, InvalidRequest),
        ("sql:latest", 1.5, InvalidRequest),
        ("sql:latest", float("nan"), InvalidRequest),
    ],
)
async def test_what_cannot_be_mirrored_is_refused(
    stack: Stack, ref: str, share: float, error: type[Exception]
) -> None:
    stack.registry.put("sql")
    await stack.start()
    with pytest.raises(error):
        async with mirror(stack, ref, share=share):
            pass


async def test_a_gateway_that_drains_ends_its_mirrors_and_opens_no_more(stack: Stack) -> None:
    stack.registry.put("sql")
    await stack.start()
    for _ in range(2):
        with pytest.raises(Unavailable, match="draining"):
            async with mirror(stack, "sql:latest"):
                stack.running._generation.refuse_new()
                await asyncio.sleep(0.1)
