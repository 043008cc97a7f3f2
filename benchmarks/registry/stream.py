"""Upper bounds of every transfer: a gRPC stream to a process that only counts bytes, and one to a
process that hashes them and writes them to a file, as every upload must.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc

from benchmarks.measuring import timed
from loraplex.allocation import reuse_large_blocks
from loraplex.client.channel import CHUNK_BYTES

_COUNT, _KEEP = "/bench.Bytes/Count", "/bench.Bytes/Keep"


class CountingServer:
    """The other end, as a process. An async context manager."""

    async def __aenter__(self) -> Self:
        reuse_large_blocks()
        self._child = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE)
        assert self._child.stdout is not None
        port = int(await asyncio.to_thread(self._child.stdout.readline))
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        self._child.terminate()
        await asyncio.to_thread(self._child.wait)

    async def stream_s(self, num_bytes: int, *, keep: bool = False) -> float:
        """Seconds that `num_bytes` take in chunks of a transfer's size.

        Args:
            keep: whether the other end hashes, writes and syncs them.
        """
        chunk = bytes(CHUNK_BYTES)
        with timed() as elapsed:
            call = self._channel.stream_unary(_KEEP if keep else _COUNT)()
            for begin in range(0, num_bytes, CHUNK_BYTES):
                await call.write(chunk[: num_bytes - begin])
            await call.done_writing()
            assert int(await call) == num_bytes
        return elapsed[0]


class _Counting(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_unary_rpc_method_handler(
            self._keep if details.method == _KEEP else self._count
        )

    async def _count(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        num_bytes = 0
        async for message in messages:
            num_bytes += len(message)
        return str(num_bytes).encode()

    async def _keep(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        """Hash here and write on a thread, which is the fastest way that was tried."""
        digest, num_bytes = hashlib.sha256(), 0
        writing: asyncio.Future[int] | None = None
        with tempfile.TemporaryFile(buffering=0) as file:
            async for message in messages:
                digest.update(message)
                num_bytes += len(message)
                if writing is not None:
                    await writing
                writing = asyncio.ensure_future(asyncio.to_thread(file.write, message))
            if writing is not None:
                await writing
            await asyncio.to_thread(os.fsync, file.fileno())
        assert len(digest.digest()) == 32
        return str(num_bytes).encode()


async def _serve() -> None:
    reuse_large_blocks()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([_Counting()])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
