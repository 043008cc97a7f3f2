"""The order of one tenant's requests, against a plain sorted list."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.common.virtual_counters import VirtualCounters
from loraplex_services.gateway.admission.dispatch_window import Window
from loraplex_services.gateway.admission.queue import AdmissionLimits, AdmissionQueue, Decision
from loraplex_services.gateway.admission.request import AdmissionRequest
from loraplex_services.gateway.admission.rising_heap import RisingHeap
from loraplex_services.gateway.admission.tenant_queue import TenantQueue

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "start", "withdraw", "charge"]),
        st.sampled_from("abc"),
        st.integers(0, 9),
        st.booleans(),
    ),
    max_size=60,
)


def key(queue: TenantQueue, request: AdmissionRequest) -> tuple[float, ...]:
    served = queue.served.present[request.adapters].served
    return (request.priority, served, request.number)


@given(ACTIONS)
def test_priority_then_service_of_the_adapters_then_arrival(
    actions: list[tuple[str, str, int, bool]],
) -> None:
    queue, waiting = TenantQueue(), list[AdmissionRequest]()
    for action, adapters, number, flag in actions:
        if action == "push":
            request = AdmissionRequest(
                "t", priority=number % 3, adapters=adapters, awaits_fetch=flag
            )
            queue.served.arrive(adapters)
            queue.push(request)
            waiting.append(request)
        elif action == "charge" and adapters in queue.served.present:
            queue.served.present[adapters].served += number
        elif waiting:
            withdrawn = waiting[number % len(waiting)]
            request = (queue.first() or withdrawn) if action == "start" else withdrawn
            queue.remove(request)
            queue.served.leave(request.adapters)
            waiting.remove(request)
        fetched = [request for request in waiting if not request.awaits_fetch]
        for expected, found in (
            (waiting, queue.first()),
            (fetched, queue.first(but_awaiting_fetch=True)),
        ):
            assert found == min(expected, key=lambda r: key(queue, r), default=None)
        assert len(queue) == len(waiting)
        if waiting:
            least = max(request.priority for request in waiting)
            assert queue.newest() == [r for r in waiting if r.priority == least][-1]


def test_a_look_at_the_first_does_not_look_at_all_that_wait() -> None:
    served, looks = VirtualCounters(), Counter[str]()
    heap: RisingHeap[int] = RisingHeap()
    for number in range(1000):
        served.arrive(number)
        heap.push(number)

    def key_of(number: int) -> tuple[float, ...]:
        looks["keys"] += 1
        return (served.present[number].served, number)

    assert heap.first(key_of) == 0
    looks.clear()
    for number in range(100):
        assert heap.first(key_of) == number
        served.present[number].served += 5.0
    assert looks["keys"] < 100 * 5


def test_requests_for_a_popular_adapter_do_not_delay_those_for_others() -> None:
    queue = AdmissionQueue(AdmissionLimits(max_running=1))
    running = AdmissionRequest("t", adapters="hot", num_prompt_tokens=50)
    queue.offer(running, 0.0)
    for _ in range(20):
        queue.offer(AdmissionRequest("t", adapters="hot"), 0.0)
    assert queue.offer(AdmissionRequest("t", adapters="cold"), 0.0) is Decision.WAIT
    queue.charge(running, 10)
    queue.release(running, 1.0)
    [started] = queue.take_ready()
    assert started.adapters == "cold"


def test_requests_that_need_no_fetch_pass_those_that_wait_for_the_window_of_fetches() -> None:
    queue = AdmissionQueue(AdmissionLimits())
    queue.window = Window(num_tokens=128.0, fetching_tokens=256.0)
    running = AdmissionRequest("t", adapters="hot")
    assert queue.offer(running, 0.0) is Decision.RUN
    cold = [AdmissionRequest("t", adapters=n, awaits_fetch=True) for n in range(9)]
    decisions = [queue.offer(request, 0.0) for request in cold]
    assert decisions == [Decision.RUN] * 2 + [Decision.WAIT] * 7
    queue.charge(running, 10)
    assert queue.offer(AdmissionRequest("t", adapters="hot"), 0.0) is Decision.WAIT
    assert not queue.take_ready()
    assert queue.first_token(running)
    assert [request.adapters for request in queue.take_ready()] == ["hot"]
