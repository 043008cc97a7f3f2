"""Uploads leave the processor of a registry to its other calls."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.client import uploading
from loraplex.client.publishing import Publication
from loraplex.client.registry_client import RegistryClient
from loraplex.client.settings import Credentials
from loraplex.v1 import registry_pb2 as pb
from loraplex_services.common.callers import LOCAL, Caller, current_caller
from loraplex_services.common.grpc import server as grpc_server
from loraplex_services.common.limits import MIB
from loraplex_services.registry.access.auth import KeyAuth
from loraplex_services.registry.api import server
from loraplex_services.registry.api.upload_pace import CORE_SHARE, MIN_BYTES_PER_S, UploadPace
from loraplex_services.registry.assembly import Registry
from tests.registry.house import adapter_files, write_folder

pytestmark = pytest.mark.hostile

GLOBEX = Caller("globex", "g", frozenset({"publisher"}))
ACME = Caller("acme", "a", frozenset({"publisher"}))


class Process:
    """Processor time and time of a process that only receives uploads and rests."""

    def __init__(self) -> None:
        self.worked_s = self.now_s = 0.0

    def work(self, seconds: float) -> None:
        self.worked_s += seconds
        self.now_s += seconds

    async def rest(self, seconds: float) -> None:
        self.now_s += seconds


def pace_of(process: Process) -> UploadPace:
    return UploadPace(lambda: process.worked_s, lambda: process.now_s, process.rest)


@pytest.mark.parametrize("callers", [[GLOBEX], [GLOBEX, ACME]])
async def test_uploads_take_a_quarter_of_a_core_however_many_tenants_send_them(
    callers: list[Caller],
) -> None:
    process = Process()
    pace = pace_of(process)
    for _ in range(100):
        for caller in callers:
            await pace.wait(caller, MIB)
            process.work(0.003)
    assert process.worked_s / process.now_s == pytest.approx(CORE_SHARE, abs=0.01)


async def test_a_message_after_a_while_does_not_wait_and_none_waits_long() -> None:
    process = Process()
    pace = pace_of(process)
    process.work(0.003)
    process.now_s += 1.0
    await pace.wait(GLOBEX, MIB)
    assert process.now_s == pytest.approx(1.003)
    process.work(3.0)  # for other calls
    await pace.wait(GLOBEX, MIB)
    assert process.now_s == pytest.approx(4.003 + MIB / MIN_BYTES_PER_S)


async def test_without_keys_uploads_do_not_rest() -> None:
    process = Process()
    pace = pace_of(process)
    for _ in range(10):
        await pace.wait(LOCAL, MIB)
        process.work(0.003)
    assert process.now_s == pytest.approx(0.03)


async def test_every_message_of_an_upload_waits_for_its_time(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = list[float]()

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    add, served, name = server.service(registry)
    assert isinstance(served, server.RegistryService)
    served._upload_pace = UploadPace(sleep=rest)
    auth = KeyAuth(registry.keys, "service-token-of-16")
    running = await grpc_server.start([(add, served, name)], ["127.0.0.1:0"], auth=auth)
    _, token = await registry.keys.create("globex", ["publisher"], 0.0, "")
    files = adapter_files(1)
    folder = write_folder(tmp_path / "a", files)
    async with RegistryClient(f"127.0.0.1:{running.port}", Credentials(api_key=token)) as client:
        await client.upload(folder, Publication("a"))
        monkeypatch.setattr(uploading, "MAX_ONE_CALL_BYTES", -1)
        other = write_folder(tmp_path / "b", adapter_files(2, lora_alpha=2))
        await client.upload(other, Publication("b"))
    await running.stop(0)
    assert len(rests) == 1 + len(files), "one call, then a part of each file"


async def test_a_message_rests_for_all_of_its_bytes_whatever_they_are(registry: Registry) -> None:
    rests = list[float]()

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    async def parts() -> AsyncIterator[pb.UploadPartRequest]:
        yield pb.UploadPartRequest(data=bytes(MIB))
        yield pb.UploadPartRequest(path="x" * MIB)

    _, served, _ = server.service(registry)
    assert isinstance(served, server.RegistryService)
    served._upload_pace = UploadPace(itertools.count(0.0, 1e6).__next__, lambda: 0.0, rest)
    token = current_caller.set(GLOBEX)
    data = [data async for _, data in served._paced(parts())]
    current_caller.reset(token)
    assert list(map(len, data)) == [MIB, 0]
    assert rests == pytest.approx([MIB / MIN_BYTES_PER_S] * 2, rel=1e-3)


async def test_tenants_pass_in_rotation_however_many_messages_one_has() -> None:
    pace, passed = UploadPace(lambda: 0.0, lambda: 0.0), list[str]()

    async def upload(caller: Caller) -> None:
        await pace.wait(caller, MIB)
        passed.append(caller.tenant)

    await asyncio.gather(*(upload(GLOBEX) for _ in range(20)), *(upload(ACME) for _ in range(2)))
    assert Counter(passed[:5])["acme"] == 2
