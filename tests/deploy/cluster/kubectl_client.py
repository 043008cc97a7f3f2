"""What a shell finds as `kubectl`: passes its arguments to `kubectl.py`, and forwards ports itself.

KUBECTL_SOCKET=PATH python kubectl_client.py ARGUMENTS...
"""

from __future__ import annotations

import asyncio
import json
import os
import sys


async def main() -> int:
    """Returns the exit status."""
    reader, writer = await asyncio.open_unix_connection(os.environ["KUBECTL_SOCKET"])
    writer.write(json.dumps(sys.argv[1:]).encode() + b"\n")
    answer = json.loads(await reader.read())
    sys.stdout.write(answer["out"])
    sys.stderr.write(answer["error"])
    if answer["forward"]:
        port, *target = answer["forward"]
        await forward(port, *target)
    return int(bool(answer["error"]))


async def forward(port: int, host: str, target: int) -> None:
    """Pass connections on, until killed."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, target)
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        await server.serve_forever()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes, then the end of the other direction."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
