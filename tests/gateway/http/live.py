"""Adapters that change while they serve, as tests see them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx

from loraplex.v1 import worker_pb2
from tests.gateway.conftest import Stack, eventually
from tests.gateway.scripted_registry import digest_of

NUM_TOKENS = 60


def letter_of(digest: str) -> int:
    """What the scripted worker generates with a version: a, b, c..."""
    return 96 + int(digest[-4:], 16)


def by_version(request: worker_pb2.WorkerRequest) -> list[int]:
    letter = letter_of(request.adapters[0].digest) if request.adapters else ord("-")
    return [letter] * request.sampling.max_tokens


async def post(stack: Stack, path: str, body: Any = None, **params: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stack.url, timeout=30.0) as client:
        return await client.post(path, json=body, params=params)


def policy_body(model: str = "policy", **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS} | fields


def start(stack: Stack, **fields: Any) -> asyncio.Task[httpx.Response]:
    fields = {"return_token_ids": True, **fields}
    return asyncio.create_task(post(stack, "/v1/completions", policy_body(**fields)))


async def until_running(stack: Stack, num_tokens: int = 5) -> None:
    sent = stack.workers[0].num_tokens_sent
    await eventually(lambda: stack.workers[0].num_tokens_sent >= sent + num_tokens)


async def update(live: Stack, version: int) -> None:
    """Publish a version of `policy` while its request stands, and wait until it is followed."""
    worker = live.workers[0]
    num_requests = len(worker.requests)
    live.registry.put("policy", version)
    await eventually(lambda: len(worker.requests) > num_requests)
    worker.stands_at = None


async def until_known(live: Stack, version: int) -> None:
    """Wait until the gateway knows a version of `policy`."""
    snapshot = live.running._resolver.snapshot
    await eventually(lambda: snapshot.version("default", "policy", version) is not None)


def check_labels(choice: dict[str, Any]) -> list[int]:
    """Each token is what the weights that it is labelled with generate; returns the versions."""
    ids, versions = choice["token_ids"], []
    for span in choice["weights"]:
        (digest,) = span["digests"]
        version = int(digest[-4:], 16)
        assert digest == digest_of("policy", version)
        assert span["adapters"] == [f"default/policy:v{version}"]
        part = ids[span["start"] : span["start"] + span["length"]]
        assert part == [letter_of(digest)] * span["length"]
        versions.append(version)
    assert sum(span["length"] for span in choice["weights"]) == len(ids)
    return versions
