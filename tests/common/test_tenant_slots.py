"""Slots go round the tenants that wait."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.errors import ResourceExhausted
from loraplex_services.common.limits import POOLS, PoolLimits
from loraplex_services.common.tenant_slots import TenantSlots

pytestmark = pytest.mark.hostile


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_leaves_one_slot_to_others() -> None:
    slots = TenantSlots(3)
    greedy = [asyncio.create_task(slots.take("globex", "work")) for _ in range(10)]
    await _settle()
    assert sum(task.done() for task in greedy) == 2
    await asyncio.wait_for(slots.take("acme", "work"), 1)
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_tenants_that_wait_get_slots_in_rotation() -> None:
    slots = TenantSlots(1)
    await slots.take("globex", "work")
    order: list[str] = []

    async def queue(tenant: str) -> None:
        await slots.take(tenant, "work")
        order.append(tenant)
        slots.give(tenant)

    tasks = [asyncio.create_task(queue("globex")) for _ in range(5)]
    await _settle()
    tasks += [asyncio.create_task(queue("acme")) for _ in range(2)]
    await _settle()
    slots.give("globex")
    await asyncio.gather(*tasks)
    assert order[:4] == ["globex", "acme", "globex", "acme"]


async def test_a_waiter_that_leaves_takes_no_slot_with_it() -> None:
    slots = TenantSlots(1)
    await slots.take("acme", "work")
    waiting = [asyncio.create_task(slots.take("globex", "work")) for _ in range(2)]
    await _settle()
    waiting[0].cancel()  # while it waits
    slots.give("acme")
    waiting[1].cancel()  # in the moment in which it is granted
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(slots.take("initech", "work"), 1)


async def test_a_tenant_with_too_many_waiting_is_refused_and_others_are_not() -> None:
    slots = TenantSlots(1, max_waiting_per_tenant=2)
    await slots.take("globex", "work")
    waiting = [asyncio.create_task(slots.take("globex", "work")) for _ in range(2)]
    await _settle()
    with pytest.raises(ResourceExhausted, match="2 requests waiting for work"):
        await slots.take("globex", "work")
    other = asyncio.create_task(slots.take("acme", "work"))
    await _settle()
    assert not other.done()
    for task in (*waiting, other):
        task.cancel()
    await asyncio.gather(*waiting, other, return_exceptions=True)


@pytest.mark.parametrize(
    "limits", [each for pools in POOLS.values() for each in pools], ids=lambda each: each.work
)
def test_no_tenant_can_hold_all_processes_of_a_pool(limits: PoolLimits) -> None:
    assert limits.num_processes >= 2
