"""What strangers without a key do to the edge: `python strangers.py ATTACK ADDRESS SECONDS`.

Prints how often it was done.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks.serving.http2_flood import opening

_NUM_AT_ONCE = 50
_NUM_SLOW = 300
_HTTP, _GRPC = 443, 50051
_NUMBERS = itertools.count()


def _tls(protocol: str) -> ssl.SSLContext:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    tls.set_alpn_protocols([protocol])
    return tls


async def streams(address: str, _: float) -> None:
    """A connection that opens a hundred streams and leaves."""
    _, writer = await asyncio.open_connection(address, _GRPC, ssl=_tls("h2"))
    writer.write(opening(100))
    await writer.drain()
    writer.transport.abort()


async def keys(address: str, _: float) -> None:
    """A request with a key that nobody has sent before."""
    reader, writer = await asyncio.open_connection(address, _HTTP, ssl=_tls("http/1.1"))
    key = f"lpx_wrong{next(_NUMBERS)}_{'s' * 20}"
    head = f"GET /v1/models HTTP/1.1\r\nhost: edge\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    if b" 401 " not in answer[:20] and b" 429 " not in answer[:20]:
        raise AssertionError(answer)


async def heads(address: str, until_s: float) -> None:
    """A request whose head arrives a header at a time and never ends."""
    _, writer = await asyncio.open_connection(address, _HTTP, ssl=_tls("http/1.1"))
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: edge\r\n")
    while time.monotonic() < until_s:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(1)
    writer.close()


async def _repeated(
    attack: Callable[[str, float], Awaitable[None]], address: str, seconds: float
) -> int:
    until_s = time.monotonic() + seconds
    num_done = 0

    async def client() -> None:
        nonlocal num_done
        while time.monotonic() < until_s:
            try:
                await attack(address, until_s)
                num_done += 1
            except OSError:  # the edge refuses the connection
                await asyncio.sleep(0.01)

    count = _NUM_SLOW if attack is heads else _NUM_AT_ONCE
    await asyncio.gather(*(client() for _ in range(count)))
    return num_done


if __name__ == "__main__":
    _attack = {each.__name__: each for each in (streams, keys, heads)}[sys.argv[1]]
    print(asyncio.run(_repeated(_attack, sys.argv[2], float(sys.argv[3]))))
