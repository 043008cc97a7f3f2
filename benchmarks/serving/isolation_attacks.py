"""Attacks by which a tenant with a valid key takes a resource from the others.

`python isolation_attacks.py NAME` reads a JSON object (host, port, registry, key) from stdin, and
attacks until its input ends. The process of a tenant gets only the time that no other wants
(`SCHED_IDLE`): attackers have machines of their own, and here they share the cores of the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from benchmarks.serving.http2_flood import CHECK, opening
from benchmarks.serving.isolation_traffic import Target, post
from loraplex.adapter_format.safetensors_header import encode_header
from loraplex.api.error_wire import from_rpc_error
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.errors import LoraplexError
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc

NUM_OWN_ADAPTERS = 24
LOOPING_ADAPTER = "looping"
LIMITED = "limited engine step"
"""Attacked by a tenant with a limit of its own."""
_ADAPTER = Path(__file__).parents[2] / "demo" / "adapters" / "upper"
_WEIGHTS = "adapter_model.safetensors"
_numbers = itertools.count(random.SystemRandom().randrange(1 << 40))
_MIB = 1 << 20
_PART_BYTES = 8 * _MIB
_WORDS = "word " * (7_900_000 // 5)
_statuses: Counter[str] = Counter()


async def _ask(target: Target, path: str, body: dict[str, Any]) -> None:
    """One request, read to its end."""
    status, reader, writer = await post(target, path, json.dumps(body).encode())
    _statuses[str(status)] += 1
    try:
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def nothing(target: Target) -> None:
    """The noise of the machine."""
    await asyncio.sleep(1)


async def long_texts(target: Target) -> None:
    """Texts of 7.9 MB, to be completed and to be tokenized."""
    text = _WORDS
    await _ask(target, "/v1/completions", {"model": "base", "prompt": text})
    await _ask(target, "/tokenize", {"model": "base", "prompt": text[: 500 * 100]})
    await _ask(target, "/v1/completions", {"model": "base", "prompt": [text[:7000]] * 1000})


async def large_batches(target: Target, num_choices: int = 16) -> None:
    """Many choices with long lists of token ids and the most urgent priority."""
    ids = list(range(250))
    body = {
        "model": "base", "prompt": "hello", "n": num_choices, "max_tokens": 64, "ignore_eos": True,
        "temperature": 1.0, "bad_token_ids": ids[3:60], "logprobs": 5, "priority": -(1 << 31),
    }  # fmt: skip
    await _ask(target, "/v1/completions", body)


async def small_batches(target: Target) -> None:
    """The same with as many choices as a tenant with `max_concurrent` = 4 may run at once."""
    await large_batches(target, 4)


async def hard_grammars(target: Target) -> None:
    """Schemas that take seconds to compile, half of them abandoned."""
    schema = {"type": "integer", "multipleOf": 900_001 + 2 * (next(_numbers) % 100_000)}
    body = {"model": "base", "prompt": "x", "max_tokens": 4, "guided_json": schema}
    if next(_numbers) % 2:
        await _ask(target, "/v1/completions", body)
    else:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await _ask(target, "/v1/completions", body)


async def looping_templates(target: Target) -> None:
    """Chats with an adapter whose template does not end."""
    body = {"model": LOOPING_ADAPTER, "messages": [{"role": "user", "content": "x"}]}
    await _ask(target, "/v1/chat/completions", body)


async def many_adapters(target: Target) -> None:
    """Requests for more adapters of its own than the worker's disk cache holds."""
    name = f"own-{next(_numbers) % NUM_OWN_ADAPTERS}"
    await _ask(target, "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})


async def registry_reads(target: Target) -> None:
    """Lists of everything, as fast as they come."""
    async with _registry(target) as (stub, metadata):
        for _ in range(100):
            await stub.ListAdapters(
                pb.ListAdaptersRequest(all_versions=True, page_size=1000), metadata=metadata
            )
            _statuses["200"] += 1


async def validations(target: Target) -> None:
    """Headers of 45,000 tensors."""
    async with _registry(target) as (stub, metadata):
        for _ in range(10):
            with _refusals():
                await stub.ValidateAdapter(_crowded(), metadata=metadata)


@functools.cache
def _crowded() -> pb.ValidateAdapterRequest:
    names = (
        f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight" for n in range(45_000)
    )
    header = encode_header((name, "F32", (1, 1)) for name in names)
    config = b'{"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}'
    size = len(header) + 4 * 45_000
    files = [
        pb.FileSpec(path="adapter_config.json", size=len(config), sha256=_sha256(config)),
        pb.FileSpec(path="adapter_model.safetensors", size=size, sha256="0" * 64),
    ]
    return pb.ValidateAdapterRequest(
        files=files, adapter_config_json=config, safetensors_header=header
    )


async def uploads(target: Target) -> None:
    """Parts of uploads that are never finished."""
    name = f"junk-{next(_numbers)}"
    config = b"{}"
    options = pb.PublishOptions(name=name)
    files = [
        pb.FileSpec(path="adapter_config.json", size=len(config), sha256=_sha256(config)),
        pb.FileSpec(path="adapter_model.safetensors", size=1 << 30, sha256=_sha256(name.encode())),
    ]
    async with _registry(target) as (stub, metadata):
        with _refusals():
            opened = await stub.CreateUpload(
                pb.CreateUploadRequest(options=options, files=files), metadata=metadata
            )
            await stub.UploadPart(_parts(opened.upload_id), metadata=metadata)


async def publications(target: Target) -> None:
    """Ephemeral adapters of other content each time, as a training loop publishes them."""
    number = next(_numbers)
    weights = bytearray((_ADAPTER / _WEIGHTS).read_bytes())
    weights[-4], weights[-8] = number & 255, number >> 8 & 255  # the lowest bits of two numbers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / _WEIGHTS).write_bytes(weights)
        shutil.copy(_ADAPTER / "adapter_config.json", folder)
        async with RegistryClient(target.registry, Credentials(api_key=target.key)) as client:
            try:
                await client.upload(folder, Publication(f"live-{number % 8}", ttl_s=3600))
                _statuses["200"] += 1
            except LoraplexError as error:
                _statuses[error.reason] += 1


async def watches(target: Target) -> None:
    """Watches, opened again whenever one is refused."""
    async with _registry(target) as (stub, metadata):
        with _refusals():
            call = stub.WatchAdapters(pb.WatchAdaptersRequest(), metadata=metadata)
            async with asyncio.timeout(5):
                async for _ in call:
                    pass
    await asyncio.sleep(0.01)


async def unknown_messages(target: Target) -> None:
    """Messages without a key, whose parsed form has 33 times their size."""
    raw = b"\x12\x00" * (8 * _MIB)
    async with grpc.aio.insecure_channel(target.registry) as channel:
        create = channel.unary_unary("/loraplex.v1.RegistryService/CreateUpload")
        for _ in range(20):
            with _refusals():
                await create(raw)


async def unknown_keys(target: Target) -> None:
    """Keys that nobody has, from one address."""
    key = f"lpx_{next(_numbers):012}_{'x' * 24}"
    await _ask(Target(target.host, target.port, "", key), "/v1/completions", {"model": "base"})


async def connections_that_leave(target: Target) -> None:
    """Calls of the registry that nobody waits for. gRPC keeps them until Python takes them."""
    host, _, port = target.registry.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(opening(100))
    await writer.drain()
    writer.transport.abort()
    _statuses["left"] += 1


async def idle_calls(target: Target, *, asks: bool) -> None:
    """Health checks whose request is never sent, or whose answer is never read."""
    await asyncio.sleep(10 * random.random())  # otherwise, calls arrive faster than they are taken
    host, _, port = target.registry.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(opening(256, asks=asks, path=CHECK))
    _statuses["opened"] += 1
    try:
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def tiny_chunks(target: Target) -> None:
    """Bodies in chunks of one byte."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 40_000
    )
    try:
        await writer.drain()
        _statuses[(await reader.readline()).decode()[9:12]] += 1
    finally:
        writer.close()


async def _parts(upload_id: str) -> AsyncIterator[pb.UploadPartRequest]:
    chunk, crc32 = _chunk()
    for offset in range(0, _PART_BYTES, _MIB):
        yield pb.UploadPartRequest(
            upload_id=upload_id,
            path="adapter_model.safetensors",
            offset=offset,
            data=chunk,
            crc32=crc32,
        )
    await asyncio.sleep(5)  # holds the stream and what it has buffered


@functools.cache
def _chunk() -> tuple[bytes, int]:
    data = os.urandom(_MIB)
    return data, zlib.crc32(data)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def _refusals() -> Any:
    try:
        yield
        _statuses["200"] += 1
    except grpc.RpcError as error:
        _statuses[from_rpc_error(error).reason] += 1
    except TimeoutError:
        _statuses["ended"] += 1


@contextlib.asynccontextmanager
async def _registry(target: Target) -> AsyncIterator[tuple[Any, Any]]:
    async with grpc.aio.insecure_channel(target.registry) as channel:
        metadata = [("authorization", f"Bearer {target.key}")]
        yield registry_pb2_grpc.RegistryServiceStub(channel), metadata


Attack = Callable[[Target], Awaitable[None]]
ATTACKS: dict[str, tuple[str, Attack, int, str]] = {
    "none (noise)": ("nothing", nothing, 1, "text"),
    "gateway event loop": ("texts of 7.9 MB", long_texts, 4, "text"),
    "engine step": ("n = 16, logprobs, lowest priority number", large_batches, 16, "text"),
    LIMITED: ("the same, with max_concurrent = 4 for it", small_batches, 16, "text"),
    "registry reads": ("lists of all versions", registry_reads, 8, "text"),
    "uploads": ("parts of unfinished uploads", uploads, 64, "text"),
    "publications": ("ephemeral adapters, one after another", publications, 8, "text"),
    "watches": ("watches, opened again", watches, 64, "text"),
    "pool of validations": ("headers of 45,000 tensors", validations, 8, "text"),
    "pool of templates": ("a template that does not end", looping_templates, 8, "chat"),
    "pool of grammars": ("hard schemas, half of them left", hard_grammars, 8, "constrained"),
    "disk": ("24 adapters in a cache for 8", many_adapters, 8, "text"),
}
"""Resource -> (what the attacker sends, how, by how many clients, the other tenant's traffic)."""
STRANGERS: dict[str, tuple[str, Attack, int, str]] = {
    "messages without a key": ("16 MiB that parse into 530 MiB", unknown_messages, 6, "text"),
    "connections that leave": ("100 calls on each", connections_that_leave, 50, "text"),
    "requests that do not arrive": (
        "health checks without a message",
        functools.partial(idle_calls, asks=False),
        100,
        "text",
    ),
    "answers that nobody reads": (
        "health checks without a window",
        functools.partial(idle_calls, asks=True),
        100,
        "text",
    ),
    "tiny chunks": ("bodies in chunks of one byte", tiny_chunks, 8, "text"),
    "wrong keys": ("a new one each time", unknown_keys, 8, "text"),
}
"""The same, without a key, and with the usual priority: what they may cost is memory."""


async def _attack(name: str, target: Target) -> None:
    _, act, num_clients, _ = {**ATTACKS, **STRANGERS}[name]

    async def client() -> None:
        while True:
            try:
                await act(target)
            except (OSError, ValueError, IndexError, grpc.RpcError) as error:
                _statuses[type(error).__name__] += 1
                await asyncio.sleep(0.05)

    await asyncio.gather(*(client() for _ in range(num_clients)))


def main() -> None:
    """Attack until stdin closes, then print how the requests ended."""
    if sys.argv[1] not in STRANGERS:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    target = Target(**json.loads(sys.stdin.readline()))

    async def run() -> None:
        attacking = asyncio.create_task(_attack(sys.argv[1], target))
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps(_statuses), flush=True)
        assert not attacking.done(), attacking.exception()
        os._exit(0)  # calls that the servers hold up do not hold up the end

    asyncio.run(run())


if __name__ == "__main__":
    main()
