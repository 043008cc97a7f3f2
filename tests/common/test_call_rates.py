"""How many calls of one tenant a server answers in a second."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.errors import InvalidRequest, LoraplexError, NotFound, ResourceExhausted
from loraplex_services.common.callers import LOCAL, ROOT, Caller
from loraplex_services.common.grpc import call_rates
from loraplex_services.common.grpc.call_rates import (
    MAX_DEBT_S,
    CallCost,
    CallRates,
    DelayedRefusals,
)
from loraplex_services.common.limits import (
    CALL_BURST,
    CALLS_PER_S,
    DOCUMENTS_PER_CALL,
    MAX_CALL_WAIT_S,
    REFUSED_CALLS,
)

pytestmark = pytest.mark.hostile


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _caller(tenant: str, key_id: str = "k1") -> Caller:
    return Caller(tenant, key_id, frozenset({"reader"}))


def _refused(rates: CallRates, tenant: str) -> bool:
    try:
        rates._reserve(tenant, 1)
    except ResourceExhausted:
        return True
    return False


def test_calls_beyond_the_burst_wait_and_those_beyond_the_wait_are_refused() -> None:
    clock = Clock()
    rates = CallRates(clock)
    waits = [rates._reserve("globex", 1) for _ in range(CALL_BURST)]
    assert max(waits) <= 0
    more = [rates._reserve("globex", 1) for _ in range(int(CALLS_PER_S * MAX_CALL_WAIT_S))]
    assert more == sorted(more)
    assert more[-1] == pytest.approx(MAX_CALL_WAIT_S)
    assert _refused(rates, "globex")
    assert rates._reserve("acme", 1) <= 0
    clock.now_s += 0.5
    assert [_refused(rates, "globex") for _ in range(CALLS_PER_S)].count(False) == CALLS_PER_S // 2


def test_a_call_that_counts_as_many_uses_as_much_of_the_rate() -> None:
    rates = CallRates(Clock())
    for _ in range(CALL_BURST // 10):
        assert rates._reserve("globex", 10) <= 0
    assert rates._reserve("globex", 10) == pytest.approx(10 / CALLS_PER_S)


async def test_services_and_callers_without_auth_are_not_counted() -> None:
    rates = CallRates(Clock())
    async with asyncio.timeout(10):
        for _ in range(10 * CALL_BURST):
            await rates.wait(LOCAL, 10)
            await rates.wait(_caller("default", "service"), 10)


def test_tenants_without_end_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_rates, "MAX_TENANTS", 10)
    rates = CallRates(Clock())
    for number in range(100):
        rates._reserve(f"tenant-{number}", 1)
    assert len(rates._used_until_s) == 10


async def test_only_refusals_of_too_many_calls_wait_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_rates, "MAX_DELAYED", 2)
    monkeypatch.setattr(call_rates, "REFUSAL_DELAY_S", 3600.0)
    refusals, many = DelayedRefusals(CallRates()), ResourceExhausted("no", reason="TOO_MANY_CALLS")
    held = [asyncio.create_task(refusals.delay(many)) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await refusals.delay(many)
        await refusals.delay(NotFound("nothing"))
        await refusals.delay(ResourceExhausted("no", reason="QUOTA_BYTES"))
    assert not any(task.done() for task in held)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    async with asyncio.timeout(10):
        monkeypatch.setattr(call_rates, "REFUSAL_DELAY_S", 0.0)
        await refusals.delay(many)


async def test_a_tenant_that_is_refused_again_and_again_waits_for_its_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    refusals = DelayedRefusals(CallRates(Clock()))
    globex = _caller("globex")
    for _ in range(CALL_BURST // REFUSED_CALLS):
        await refusals.delay(InvalidRequest("no"), globex)
    await refusals.delay(LoraplexError("a fault of the server"), globex)
    assert not slept
    await refusals.delay(InvalidRequest("no"), globex)
    assert slept == [pytest.approx(REFUSED_CALLS / CALLS_PER_S)]
    await refusals.delay(InvalidRequest("no"), _caller("acme"))
    await refusals.delay(InvalidRequest("no"), LOCAL)
    assert len(slept) == 1, "others do not wait"


def test_a_call_that_reads_many_documents_counts_as_more_calls() -> None:
    clock = Clock()
    rates = CallRates(clock)
    cost = CallCost(rates, _caller("globex"), 10)
    cost.add(11 * DOCUMENTS_PER_CALL - 1)
    assert rates._used_until_s.get("globex") is None
    cost.add(1)
    assert rates._used_until_s.get("globex") == pytest.approx(clock.now_s + 1 / CALLS_PER_S)
    cost.add(1_000_000_000)
    assert rates._used_until_s.get("globex") == pytest.approx(clock.now_s + MAX_DEBT_S)
    operator = Caller("default", "k1", frozenset({"admin", ROOT}))
    for caller in (LOCAL, operator):
        CallCost(rates, caller, 1).add(1_000_000_000)
        assert rates._used_until_s.get(caller.tenant) is None
