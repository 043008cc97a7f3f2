"""Clients of `stack.py`: a process of its own that reads streams, without torch.

Each line of stdin is a job in JSON: `kind` ("grpc" or "http"), `address`, `tokens`, and `requests`,
a list of [model, prompt]. All requests are sent at `begin_s`, a time of the machine's monotonic
clock, or, with `one_by_one`, each when the one before it has ended. A line of stdout answers with
[seconds to the first token, seconds to the last] of each, counted from when it was sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from loraplex.api.sampling import Sampling
from loraplex.client.inference_client import InferenceClient


async def run(job: dict[str, Any]) -> list[tuple[float, float]]:
    """All requests of a job."""
    async with AsyncExitStack() as stack:
        grpc = None
        if job["kind"] == "grpc":
            grpc = await stack.enter_async_context(InferenceClient(job["address"]))
        await asyncio.sleep(job["begin_s"] - time.monotonic())
        if job["one_by_one"]:
            return [await time_one(job, each, grpc) for each in job["requests"]]
        return await asyncio.gather(*(time_one(job, each, grpc) for each in job["requests"]))


async def time_one(
    job: dict[str, Any], request: tuple[str, list[int]], grpc: InferenceClient | None
) -> tuple[float, float]:
    """Seconds to the first and to the last token of one request. Raises AssertionError if tokens
    are missing."""
    model, prompt = request
    begin_s, first_s, num_tokens = time.monotonic(), 0.0, 0
    if grpc is None:
        counts = over_http(job["address"], model, prompt, job["tokens"])
    else:
        counts = over_grpc(grpc, model, prompt, job["tokens"])
    async for count in counts:
        first_s = first_s or time.monotonic()
        num_tokens += count
    assert num_tokens == job["tokens"], f"{num_tokens} of {job['tokens']} tokens came"
    return first_s - begin_s, time.monotonic() - begin_s


async def over_grpc(
    client: InferenceClient, model: str, prompt: list[int], num_tokens: int
) -> AsyncGenerator[int]:
    """The number of tokens of each message."""
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    async for chunk in client.generate(model, prompt, sampling):
        if chunk.token_ids:
            yield len(chunk.token_ids)


async def over_http(
    address: str, model: str, prompt: list[int], num_tokens: int
) -> AsyncGenerator[int]:
    """The number of tokens of each server-sent event, from a plain socket: a reader must cost less
    than what it measures."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    status = await reader.readline()
    assert b" 200 " in status, status + await reader.read()
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                if ids := choice.get("token_ids"):
                    yield len(ids)
    writer.close()


def main() -> None:
    """Jobs until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
