"""Ordinary traffic of one tenant, and how long it waited."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc

NUM_STREAMS = 2
NEW_TOKENS = 16
_READ_EVERY_S = 0.02
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Waits:
    """Seconds that requests of one turn waited, and how they ended."""

    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    registry_read_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def num_failed(self) -> int:
        """Requests that were refused or ended with an error."""
        return sum(count for status, count in self.statuses.items() if status != "200")


@dataclass(frozen=True, slots=True)
class Target:
    """A stack as one tenant uses it."""

    host: str
    port: int
    registry: str
    key: str


async def post(target: Target, path: str, body: bytes) -> tuple[int, asyncio.StreamReader, Any]:
    """Send a request; the status, and the streams at the start of the answer's body."""
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=1 << 24)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"authorization: Bearer {target.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode())
    writer.write(body)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    return status, reader, writer


async def ordinary_traffic(target: Target, model: str, kind: str, seconds: float) -> Waits:
    """Streams of short answers and reads of the registry, for some seconds.

    Args:
        kind: "text", "chat" (which renders a template) or "constrained" (a new grammar each time).
    """
    waits = Waits()
    end_s = time.perf_counter() + seconds

    async def streams(stream: int) -> None:
        number = 0
        while time.perf_counter() < end_s:
            number += 1
            await _stream(target, model, kind, f"{stream}.{number}.{seconds}", waits)

    async with grpc.aio.insecure_channel(target.registry) as channel:
        reads = asyncio.create_task(_reads(channel, target, model, waits))
        await asyncio.gather(*(streams(index) for index in range(NUM_STREAMS)))
        reads.cancel()
        await asyncio.gather(reads, return_exceptions=True)
    return waits


async def _stream(target: Target, model: str, kind: str, unique: str, waits: Waits) -> None:
    """One streamed answer."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    body: dict[str, Any] = {
        "model": model, "max_tokens": NEW_TOKENS, "stream": True, "temperature": 0,
    }  # fmt: skip
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = "hello="
    if kind == "constrained":
        body["guided_regex"] = f"[a-z]{{16}}({unique.replace('.', '')}{time.time_ns()})?"
    else:
        body |= {"ignore_eos": True}
    begin_s = last_s = time.perf_counter()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status, reader, writer = await post(target, path, json.dumps(body).encode())
            is_first = True
            async for line in reader:
                if line.startswith(b'data: {"error"'):
                    status = 599
                if not line.startswith(b"data: {") or not _has_text(line):
                    continue
                now_s = time.perf_counter()
                (waits.first_token_s if is_first else waits.between_tokens_s).append(now_s - last_s)
                is_first, last_s = False, now_s
            writer.close()
        waits.statuses[str(status)] += 1
    except (OSError, TimeoutError) as error:
        waits.first_token_s.append(time.perf_counter() - begin_s)
        waits.statuses[type(error).__name__] += 1


def _has_text(line: bytes) -> bool:
    return b'"text":""' not in line and b'"delta":{"role"' not in line


async def _reads(channel: grpc.aio.Channel, target: Target, model: str, waits: Waits) -> None:
    """Look an adapter up at the registry, again and again."""
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    metadata = [("authorization", f"Bearer {target.key}")]
    while True:
        begin_s = time.perf_counter()
        try:
            await stub.GetAdapter(
                pb.GetAdapterRequest(ref=model), metadata=metadata, timeout=_TIMEOUT_S
            )
            waits.registry_read_s.append(time.perf_counter() - begin_s)
            waits.statuses["200"] += 1
        except grpc.RpcError as error:
            waits.statuses[str(error.code())] += 1
        await asyncio.sleep(_READ_EVERY_S)
