"""Uploads leave the processor of a registry to its other calls."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from loraplex_services.common.callers import LOCAL, Caller
from loraplex_services.common.limits import MIB
from loraplex_services.registry.api.upload_pace import CORE_SHARE, MIN_BYTES_PER_S, UploadPace

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


async def test_tenants_pass_in_rotation_however_many_messages_one_has() -> None:
    pace, passed = UploadPace(lambda: 0.0, lambda: 0.0), list[str]()

    async def upload(caller: Caller) -> None:
        await pace.wait(caller, MIB)
        passed.append(caller.tenant)

    await asyncio.gather(*(upload(GLOBEX) for _ in range(20)), *(upload(ACME) for _ in range(2)))
    assert Counter(passed[:5])["acme"] == 2
