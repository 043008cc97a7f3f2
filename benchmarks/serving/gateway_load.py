"""Clients for the gateway's benchmark: a process of its own whose streams only read.

They read token ids over gRPC, or server-sent events over HTTP from plain sockets, because a reader
must cost less than what it measures. Prints one number at the end: tokens or events read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import grpc

from loraplex.v1 import inference_pb2, inference_pb2_grpc


async def read_ids(address: str, num_tokens: int) -> int:
    """One stream of token ids."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            model="base",
            token_ids=inference_pb2.TokenIds(ids=[97, 98]),
            sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        return sum([len(message.token_ids) async for message in stub.Generate(request)])


async def read_events(address: str, num_tokens: int) -> int:
    """One stream of server-sent events."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"model": "base", "prompt": "ab", "max_tokens": num_tokens, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    tail = b""
    while part := await reader.read(1 << 16):
        tail = (tail + part)[-4096:]
    writer.close()
    usage = tail.rpartition(b'"completion_tokens":')[2]
    return int(usage.partition(b",")[0])


async def run(args: argparse.Namespace) -> int:
    """All streams at once; returns the tokens they read."""
    read = read_ids if args.kind == "ids" else read_events
    streams = [read(args.address, args.tokens) for _ in range(args.streams)]
    return sum(await asyncio.gather(*streams))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["ids", "sse"], required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    print(asyncio.run(run(parser.parse_args())))
    sys.exit(0)
