"""What one tenant may fill of the batches while others are there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from loraplex_services.gateway.admission.batch_share import ACTIVE_S, BatchShare
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.admission.dispatch_window import ReadyWorkers
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.admission.request import AdmissionRequest
from tests.virtual_time import run_virtually

pytestmark = pytest.mark.hostile


def test_a_tenant_that_is_alone_has_no_limit() -> None:
    share = BatchShare()
    for now_s in range(100):
        share.seen("acme", float(now_s))
        assert share.of_tenant(8, float(now_s)) == 0


def test_while_two_tenants_are_there_each_has_half() -> None:
    share = BatchShare()
    for now_s, tenant in enumerate(["acme", "globex", "globex", "acme", "initech"]):
        share.seen(tenant, float(now_s))
    assert share.of_tenant(8, 4.0) == 4
    assert share.of_tenant(1, 4.0) == 1
    assert share.of_tenant(0, 4.0) == 0
    share.seen("initech", 3.0 + ACTIVE_S)
    assert share.of_tenant(8, 3.0 + ACTIVE_S) == 4
    assert share.of_tenant(8, 3.1 + ACTIVE_S) == 0


async def _running_of(controller: AdmissionController, tenants: list[str]) -> dict[str, int]:
    """Sequences that run after each tenant in turn asked, and nothing ended."""
    async with AsyncExitStack() as stack:

        async def ask(tenant: str) -> None:
            await stack.enter_async_context(controller.admit(AdmissionRequest(tenant)))

        asking = [asyncio.create_task(ask(tenant)) for tenant in tenants]
        await asyncio.sleep(1)
        running = {tenant: controller.queue.num_running_of(tenant) for tenant in set(tenants)}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return running


@pytest.mark.parametrize(
    ("shares_batch", "limit", "expected"), [(True, None, 4), (True, 6, 6), (False, None, 7)]
)
def test_a_flood_of_one_tenant_leaves_half_of_the_batch_unless_it_has_its_own_limit(
    shares_batch: bool, limit: int | None, expected: int
) -> None:
    async def run() -> dict[str, int]:
        controller = AdmissionController(
            AdmissionLimits(), lambda: ReadyWorkers(1, batch_capacity=8), shares_batch=shares_batch
        )
        controller.set_limit("globex", limit)
        return await _running_of(controller, ["acme", *["globex"] * 20])

    assert run_virtually(run()) == {"acme": 1, "globex": expected}
