"""Sequences of one tenant at several gateways: never more than its limit, fairly divided."""

from __future__ import annotations

import asyncio
from typing import Any

from loraplex.api.tenants import TenantLimits
from loraplex_services.gateway.admission.concurrency import TenantConcurrency
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.admission.rate_limit_store import (
    LocalRateLimitStore,
    RateLimitStore,
    RedisRateLimitStore,
)
from loraplex_services.gateway.admission.request import AdmissionRequest
from tests.gateway.simulated.shared import SimulatedRedis
from tests.virtual_time import run_virtually

LIMITS = TenantLimits("t", max_concurrent=10)


class Counter:
    """One gateway's admission, and clients that keep asking."""

    def __init__(self, rate_limit_store: RateLimitStore) -> None:
        self.controller = AdmissionController(AdmissionLimits())
        self.leases = TenantConcurrency(rate_limit_store, self.controller)
        self.num_served = 0
        self._tasks = [asyncio.create_task(self.leases.run())]

    def ask_for_ever(self, num_clients: int) -> None:
        self._tasks += [asyncio.create_task(self._client()) for _ in range(num_clients)]

    async def stop_asking(self) -> None:
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks[1:], return_exceptions=True)
        del self._tasks[1:]

    async def _client(self) -> None:
        while True:
            request = AdmissionRequest("t")
            async with self.leases.held(LIMITS, 1), self.controller.admit(request):
                await asyncio.sleep(0.1)
                self.num_served += 1


def _running(*counters: Counter) -> int:
    return sum(counter.controller.queue.num_running_of("t") for counter in counters)


async def _most_running(counters: list[Counter], seconds: float) -> int:
    most = 0
    for _ in range(round(seconds * 200)):
        most = max(most, _running(*counters))
        await asyncio.sleep(0.005)
    return most


def test_gateways_share_a_limit_and_pass_on_what_they_do_not_need() -> None:
    async def main() -> None:
        redis: Any = SimulatedRedis()
        first, second = (Counter(RedisRateLimitStore(redis, name)) for name in ("a", "b"))
        both = [first, second]
        first.ask_for_ever(20)
        assert await _most_running(both, 2.0) == 10
        second.ask_for_ever(20)
        assert await _most_running(both, 2.0) <= 10
        before = first.num_served, second.num_served
        assert await _most_running(both, 5.0) == 10
        served = first.num_served - before[0], second.num_served - before[1]
        assert 0.8 <= served[0] / served[1] <= 1.25
        await first.stop_asking()
        await asyncio.sleep(1.0)
        assert _running(second) == 10

    run_virtually(main())


def test_lone_gateway_needs_no_server() -> None:
    async def main() -> None:
        alone = Counter(LocalRateLimitStore())
        alone.ask_for_ever(20)
        assert await _most_running([alone], 1.0) == 10
        await alone.stop_asking()
        await asyncio.sleep(1.0)
        assert _running(alone) == 0

    run_virtually(main())


class SlowStore(LocalRateLimitStore):
    """Answers after five seconds."""

    async def hold(self, tenant: str, limit: int, want: int, running: int) -> int:
        await asyncio.sleep(5.0)
        return await super().hold(tenant, limit, want, running)


def test_client_that_leaves_while_its_lease_is_asked_for_is_not_counted() -> None:
    async def main() -> None:
        counter = Counter(SlowStore())
        counter.ask_for_ever(1)
        await asyncio.sleep(1.0)
        await counter.stop_asking()
        await asyncio.sleep(10.0)
        # A tenant without requests is forgotten, and with it the limit of its lease.
        async with asyncio.timeout(1.0):
            requests = AdmissionRequest("t"), AdmissionRequest("t", cost=10)
            first, second = map(counter.controller.admit, requests)
            async with first, second:
                assert _running(counter) == 11

    run_virtually(main())


def test_a_tenant_whose_limit_is_removed_is_not_held_up_by_its_running_requests() -> None:
    async def main() -> None:
        gateway = Counter(LocalRateLimitStore())
        begun: list[AdmissionRequest] = []

        async def run(limits: TenantLimits, seconds: float) -> None:
            request = AdmissionRequest("t")
            async with gateway.leases.held(limits, 1), gateway.controller.admit(request):
                begun.append(request)
                await asyncio.sleep(seconds)

        limited = asyncio.create_task(run(TenantLimits("t", max_concurrent=1), 10.0))
        await asyncio.sleep(1.0)
        free = [asyncio.create_task(run(TenantLimits("t"), 100.0)) for _ in range(5)]
        await asyncio.sleep(1.0)
        assert len(begun) == 6
        await limited
        await asyncio.sleep(1.0)
        last = asyncio.create_task(run(TenantLimits("t"), 1.0))
        await asyncio.sleep(1.0)
        assert len(begun) == 7
        await asyncio.gather(last, *free)

    run_virtually(main())
