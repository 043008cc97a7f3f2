"""Charging tenants: alone, and several gateways on one real metadata server."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from loraplex.api.tenants import TenantLimits
from loraplex.errors import ResourceExhausted
from loraplex_services.common.redis_url import connect_redis
from loraplex_services.gateway.admission import rate_limit_store as rate_limit_store
from loraplex_services.gateway.admission.rate_limit_store import (
    LocalRateLimitStore,
    RedisRateLimitStore,
)
from loraplex_services.gateway.admission.rates import TenantRates
from loraplex_services.gateway.admission.token_buckets import capacity_of
from tests.servers import running_metadata

RATE = 50.0


@pytest.fixture
def metadata() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of each test's own, since one of them kills it."""
    with running_metadata() as running:
        yield running


@pytest.fixture
async def owners(
    metadata: tuple[str, subprocess.Popen[bytes]],
) -> AsyncIterator[list[RedisRateLimitStore]]:
    made = [RedisRateLimitStore(connect_redis(metadata[0]), f"g{number}") for number in range(2)]
    signing = [asyncio.create_task(owner.run()) for owner in made]
    yield made
    for task in signing:
        task.cancel()
    for owner in made:
        await owner.close()


class Clock:
    """Time by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def _charge(
    rates: TenantRates, limits: TenantLimits, num_tokens: int, num_used: int | None = None
) -> None:
    """Run a request that uses all of its tokens, or `num_used` of them."""
    used = num_tokens if num_used is None else num_used
    await rates.charge_request(limits)
    async with rates.charged(limits, num_tokens, lambda: used):
        pass


async def _paid(rates: TenantRates, limits: TenantLimits, count: int) -> int:
    paid = 0
    for _ in range(count):
        with suppress(ResourceExhausted):
            await _charge(rates, limits, 1)
            paid += 1
    return paid


async def test_refusal_says_why_and_when() -> None:
    rates = TenantRates(LocalRateLimitStore(Clock()), Clock())
    limits = TenantLimits("t", requests_per_s=2.0)
    assert await _paid(rates, limits, 2) == 2
    with pytest.raises(ResourceExhausted) as caught:
        await _charge(rates, limits, 1)
    assert caught.value.reason == "TENANT_REQUESTS_PER_S"
    assert caught.value.retry_after_s == pytest.approx(0.5)


async def test_request_refused_for_its_tokens_costs_no_request() -> None:
    clock = Clock()
    rates = TenantRates(LocalRateLimitStore(clock), clock)
    limits = TenantLimits("t", requests_per_s=2.0, tokens_per_s=10.0)
    await _charge(rates, limits, 10)
    for _ in range(5):
        with pytest.raises(ResourceExhausted) as caught:
            await _charge(rates, limits, 10)
        assert caught.value.reason == "TENANT_TOKENS_PER_S"
    clock.now_s = 1.0
    await _charge(rates, limits, 10)


async def test_tokens_that_were_not_generated_are_given_back() -> None:
    rates = TenantRates(LocalRateLimitStore(Clock()), Clock())
    limits = TenantLimits("t", tokens_per_s=100.0)
    await _charge(rates, limits, 100, num_used=10)
    await _charge(rates, limits, 90)
    with pytest.raises(ResourceExhausted):
        await _charge(rates, limits, 10)


async def test_tenants_do_not_share() -> None:
    rates = TenantRates(LocalRateLimitStore(Clock()), Clock())
    assert await _paid(rates, TenantLimits("a", requests_per_s=1.0), 5) == 1
    assert await _paid(rates, TenantLimits("b", requests_per_s=1.0), 5) == 1
    assert await _paid(rates, TenantLimits("c"), 50) == 50


async def test_two_gateways_on_one_server_keep_one_rate(owners: list[RedisRateLimitStore]) -> None:
    limits = TenantLimits("shared", requests_per_s=RATE)
    both = [TenantRates(owner) for owner in owners]
    start_s = time.monotonic()
    paid = 0
    while time.monotonic() - start_s < 1.5:
        paid += sum(await asyncio.gather(*[_paid(rates, limits, 3) for rates in both]))
        await asyncio.sleep(0.01)
    elapsed_s = time.monotonic() - start_s
    capacity = capacity_of(RATE)
    assert paid <= RATE * elapsed_s + capacity + 2 * capacity
    assert paid >= RATE * 1.5


async def test_sequences_of_a_tenant_are_leased_by_the_server(
    owners: list[RedisRateLimitStore],
) -> None:
    first, second = owners
    assert await first.hold("t", 9, 20, 0) == 9
    # All are in use: the other waits for its part, and gets it as they become free.
    assert await second.hold("t", 9, 20, 0) == 0
    assert await first.hold("t", 9, 20, 9) == 4
    assert await second.hold("t", 9, 20, 0) == 0
    assert await first.hold("t", 9, 20, 5) == 4
    assert await second.hold("t", 9, 20, 0) == 4
    # What one does not want the other has.
    assert await second.hold("t", 9, 0, 0) == 0
    assert await first.hold("t", 9, 20, 4) == 9


async def test_without_the_server_each_gateway_keeps_its_share(
    metadata: tuple[str, subprocess.Popen[bytes]], owners: list[RedisRateLimitStore]
) -> None:
    while [owner.num_gateways for owner in owners] != [2, 2]:
        await asyncio.sleep(0.02)
    metadata[1].kill()
    metadata[1].wait()
    limits = TenantLimits("alone", requests_per_s=10.0)
    paid = [await _paid(TenantRates(owner), limits, 40) for owner in owners]
    assert all(5 <= count <= 7 for count in paid), paid


async def test_a_metadata_server_that_hangs_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limit_store, "_ANSWER_S", 0.05)
    writers: list[asyncio.StreamWriter] = []

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_unix_server(hang, tmp_path / "s")
    owner = RedisRateLimitStore(connect_redis(f"unix://{tmp_path}/s"), "g0")
    assert (await owner.ask("tokens:t", RATE, 1.0, 0.0, 0.0)).amount == 1.0
    assert await owner.hold("t", limit=4, want=3, running=0) == 3
    assert len(writers) == 1, "the second question must not try again at once"
    await owner.close()
    for writer in writers:
        writer.close()
    server.close()


async def test_that_the_metadata_server_is_away_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rate_limit_store, "_RETRY_S", 1e-9)
    owner = RedisRateLimitStore(connect_redis("unix:///nonexistent/socket"), "g0")
    for _ in range(3):
        await owner.ask("tokens:t", RATE, 1.0, 0.0, 0.0)
    assert len(caplog.records) == 1
    await owner.close()
