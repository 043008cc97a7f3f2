"""Single files of a version arrive whole and true, or not at all, and a registry that cannot be
reached is logged."""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapter_format import File
from loraplex.errors import DataLoss, Unavailable
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.grpc import channels
from loraplex_services.common.grpc.channels import Channels
from loraplex_services.common.security.tls import TlsFiles
from loraplex_services.gateway.registry import link as link_module
from loraplex_services.gateway.registry.link import RegistryLink
from loraplex_services.gateway.registry.resolve import Resolver
from tests.certificates import Authority
from tests.gateway.conftest import eventually
from tests.sdk.servers import ScriptedDownload, serving

WANTED = [
    File("tokenizer.json", 6, hashlib.sha256(b"abcdef").hexdigest()),
    File("chat_template.jinja", 2, hashlib.sha256(b"xy").hexdigest()),
]

REGISTRY = """
import asyncio
from tests.gateway.scripted_registry import ScriptedRegistry
from tests.sdk.servers import serving

async def main():
    async with serving(ScriptedRegistry()) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def read(chunks: Sequence[tuple[str, bytes]]) -> dict[str, bytes]:
    sent = [pb.FileChunk(path=path, data=data) for path, data in chunks]
    async with serving(ScriptedDownload([], sent)) as address:
        link = RegistryLink(address)
        try:
            return await link.read_files("default/a:v1", WANTED)
        finally:
            await link.close()


async def test_chunks_are_joined() -> None:
    got = await read(
        [("tokenizer.json", b"abc"), ("tokenizer.json", b"def"), ("chat_template.jinja", b"xy")]
    )
    assert got == {"tokenizer.json": b"abcdef", "chat_template.jinja": b"xy"}


@pytest.mark.parametrize(
    "chunks",
    [
        [("tokenizer.json", b"abcdef")],
        [("tokenizer.json", b"abcdeX"), ("chat_template.jinja", b"xy")],
        [("tokenizer.json", b"abcdefg"), ("chat_template.jinja", b"xy")],
        [("adapter_model.safetensors", b"a")],
    ],
    ids=["a file is missing", "other bytes", "too many bytes", "a file nobody asked for"],
)
async def test_anything_else_is_refused(chunks: list[tuple[str, bytes]]) -> None:
    with pytest.raises(DataLoss):
        await read(chunks)


async def test_a_registry_that_is_away_says_so() -> None:
    link = RegistryLink("127.0.0.1:1")
    for call in (link.read_files("default/a:v1", WANTED), link.check_key("lpx_a_" + "s" * 24)):
        with pytest.raises(Unavailable) as refused:
            await call
        assert refused.value.reason == "REGISTRY_UNAVAILABLE"
        assert refused.value.retry_after_s
        assert "127.0.0.1" not in refused.value.message  # strangers with invented keys read it
    await link.close()


async def test_a_registry_that_refuses_the_gateways_certificate_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house, stranger = Authority(tmp_path / "house"), Authority(tmp_path / "stranger")
    own, shown = house.issue("registry"), stranger.issue("gateway")
    server_tls = TlsFiles(house.ca, own.cert, own.key).server(for_services=True)
    async with serving(ScriptedDownload([], []), tls=server_tls) as address:
        link = RegistryLink(address, channels=Channels(TlsFiles(house.ca, shown.cert, shown.key)))
        following = asyncio.create_task(link.follow(Resolver(link, dict)))
        await eventually(lambda: "registry watch failed" in caplog.messages)
        assert "failed to connect" in caplog.records[-1].__dict__["problem"]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await link.close()


class Counting(RegistryLink):
    """Counts the watches that it opens."""

    num_watches = 0

    def _changes(self, resume_token: str) -> AsyncGenerator[Any]:
        self.num_watches += 1
        return super()._changes(resume_token)


async def test_grpc_alone_waits_longer_and_longer_for_a_registry_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One second more passed before a registry that was back was noticed."""
    monkeypatch.setattr(link_module, "_RETRY_S", (0.01, math.inf))
    link = Counting("127.0.0.1:1")
    following = asyncio.create_task(link.follow(Resolver(link, dict)))
    await eventually(lambda: link.num_watches > 2)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await link.close()


@pytest.mark.long  # a client may not ping more often than every 10 s
async def test_a_registry_that_hangs_counts_as_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pinging = dict(channels._OPTIONS) | {"grpc.keepalive_time_ms": 10_000}
    monkeypatch.setattr(channels, "_OPTIONS", list(pinging.items()))
    with subprocess.Popen([sys.executable, "-c", REGISTRY], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        link = RegistryLink(server.stdout.readline().decode().strip())
        following = asyncio.create_task(link.follow(Resolver(link, dict)))
        await eventually(lambda: link.is_watching)
        server.send_signal(signal.SIGSTOP)
        await eventually(lambda: not link.is_watching, within_s=50)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await link.close()
        server.kill()
