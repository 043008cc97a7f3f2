"""Waiting for admission: requests start, clients leave, deadlines pass."""

from __future__ import annotations

import asyncio
import time

import pytest

from loraplex.errors import DeadlineExceeded, ResourceExhausted
from loraplex_services.gateway.admission.controller import AdmissionController
from loraplex_services.gateway.admission.queue import AdmissionLimits
from loraplex_services.gateway.admission.request import AdmissionRequest


async def _hold(
    controller: AdmissionController,
    request: AdmissionRequest,
    release: asyncio.Event,
    log: list[int],
) -> None:
    async with controller.admit(request):
        log.append(request.number)
        await release.wait()


async def test_permits_pass_on_in_order() -> None:
    controller = AdmissionController(AdmissionLimits(max_running=1))
    release, log = asyncio.Event(), list[int]()
    requests = [AdmissionRequest("t") for _ in range(4)]
    tasks = [asyncio.create_task(_hold(controller, request, release, log)) for request in requests]
    await asyncio.sleep(0)
    assert (controller.queue.num_running, controller.queue.num_waiting) == (1, 3)
    release.set()
    await asyncio.gather(*tasks)
    assert log == [request.number for request in requests]
    assert (controller.queue.num_running, controller.queue.num_waiting) == (0, 0)


async def test_client_that_leaves_the_queue_blocks_nobody() -> None:
    controller = AdmissionController(AdmissionLimits(max_running=1))
    release, log = asyncio.Event(), list[int]()
    first, second, third = (
        asyncio.create_task(_hold(controller, AdmissionRequest("t"), release, log))
        for _ in range(3)
    )
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    await asyncio.gather(first, third)
    assert len(log) == 2
    assert controller.queue.num_running == 0


async def test_client_that_leaves_at_the_moment_of_its_admission_frees_its_permit() -> None:
    controller = AdmissionController(AdmissionLimits(max_running=1))
    release, log = asyncio.Event(), list[int]()
    first = asyncio.create_task(_hold(controller, AdmissionRequest("t"), release, log))
    second = asyncio.create_task(_hold(controller, AdmissionRequest("t"), release, log))
    await asyncio.sleep(0)
    release.set()
    await first
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert (controller.queue.num_running, controller.queue.num_waiting) == (0, 0)


async def test_full_queue_refuses_with_a_hint() -> None:
    controller = AdmissionController(AdmissionLimits(max_running=1, max_waiting=0))
    release, log = asyncio.Event(), list[int]()
    running = asyncio.create_task(_hold(controller, AdmissionRequest("t"), release, log))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as caught:
        async with controller.admit(AdmissionRequest("t")):
            pass
    assert caught.value.retry_after_s
    release.set()
    await running


async def test_deadline_passes_in_the_queue() -> None:
    controller = AdmissionController(AdmissionLimits(max_running=1))
    release, log = asyncio.Event(), list[int]()
    running = asyncio.create_task(_hold(controller, AdmissionRequest("t"), release, log))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        async with controller.admit(AdmissionRequest("t", deadline_s=time.monotonic() + 0.02)):
            pass
    assert controller.queue.num_waiting == 0
    release.set()
    await running


async def test_waiting_request_dropped_for_another_tenant_is_refused_with_a_hint() -> None:
    controller = AdmissionController(AdmissionLimits(max_running=1, max_waiting=2))
    release, log = asyncio.Event(), list[int]()
    greedy = [
        asyncio.create_task(_hold(controller, AdmissionRequest("g"), release, log))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    polite = asyncio.create_task(_hold(controller, AdmissionRequest("p"), release, log))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as caught:
        await greedy[2]
    assert caught.value.retry_after_s
    release.set()
    await asyncio.gather(*greedy[:2], polite)
    assert (controller.queue.num_running, controller.queue.num_waiting, len(log)) == (0, 0, 3)


async def test_clients_that_all_leave_at_once_give_everything_back() -> None:
    """Places come free for waiting requests whose clients are gone and had no time to say so."""
    controller = AdmissionController(AdmissionLimits(max_running=2))
    release, log = asyncio.Event(), list[int]()
    tasks = [
        asyncio.create_task(_hold(controller, AdmissionRequest("t"), release, log))
        for _ in range(6)
    ]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (controller.queue.num_running, controller.queue.num_waiting) == (0, 0)
    assert all(task.cancelled() for task in tasks)
