"""Orders of the queue."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.request import AdapterSet
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.scheduling.policies import (
    FIRST_COME,
    Policy,
    QueueView,
    ServiceCounters,
    clustered,
    fair,
    running_order,
)
from loraplex_services.worker.types.request import Request


def make_request(name: str, arrival_s: float, digest: str = "", **fields: object) -> Request:
    adapters = AdapterSet(((digest, 1.0),)) if digest else AdapterSet()
    sampling = SamplingParams(max_tokens=4, seed=0)
    return Request(name, [1], sampling, adapters, arrival_s=arrival_s, **fields)


def in_order(
    policy: Policy,
    queue: list[Request],
    now: float,
    in_use: Collection[str] = (),
    sizes: tuple[int, int] = (0, 0),
) -> list[str]:
    view = QueueView(now, in_use, *sizes)
    return [r.request_id for r in sorted(queue, key=lambda request: policy.key(request, view))]


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["fair", "fcfs", "clustered", "fair and clustered"])
def test_a_priority_never_puts_a_tenant_before_another(name: str) -> None:
    counters = ServiceCounters()
    policy = fair(counters) if "fair" in name else FIRST_COME
    if "clustered" in name:
        policy = clustered(policy, 1)
    queue = [
        make_request("acme", 1.0, tenant="acme"),
        *(
            make_request(f"globex{n}", 2.0 + n, tenant="globex", priority=-(1 << 31))
            for n in range(3)
        ),
    ]
    for request in queue:
        counters.arrive(request)
    assert in_order(policy, queue, 10.0)[0] == "acme"


@pytest.mark.hostile
def test_a_priority_moves_running_requests_within_the_positions_of_their_tenant() -> None:
    requests = [
        make_request("a", 1.0, tenant="globex"),
        make_request("b", 2.0, tenant="acme"),
        make_request("c", 3.0, tenant="globex", priority=-9),
        make_request("d", 4.0, tenant="acme", priority=5),
        make_request("e", 5.0, tenant="acme"),
    ]
    assert [r.request_id for r in running_order(requests)] == ["c", "b", "a", "e", "d"]


def test_within_a_tenant_fair_serves_the_most_urgent_first() -> None:
    counters = ServiceCounters()
    queue = [
        make_request("late", 3.0),
        make_request("urgent", 9.0, "h", priority=-1),
        make_request("early", 1.0),
    ]
    for request in queue:
        counters.arrive(request)
    assert in_order(fair(counters), queue, 10.0) == ["urgent", "early", "late"]


def test_clustering_prefers_running_adapters_only_when_there_are_enough() -> None:
    queue = [make_request("new", 1.0, "n"), make_request("hot", 2.0, "h")]
    order = clustered(FIRST_COME, 2, max_age_s=5.0)
    assert in_order(order, queue, 3.0, {"h"}) == ["new", "hot"]
    assert in_order(order, queue, 3.0, {"h", "i"}) == ["hot", "new"]


def test_an_aged_request_comes_before_preferred_ones() -> None:
    queue = [make_request("new", 1.0, "n"), make_request("hot", 2.0, "h")]
    order = clustered(FIRST_COME, 1, max_age_s=5.0)
    assert in_order(order, queue, 6.0, {"h"}) == ["new", "hot"]


@given(
    st.lists(st.tuples(st.floats(0, 9), st.sampled_from("hiklm"), st.integers(-1, 1)), max_size=9),
    st.integers(0, 40),
    st.integers(0, 20),
)
def test_clustering_overtakes_nobody_while_few_wait(
    arrivals: list[tuple[float, str, int]], num_waiting: int, num_running: int
) -> None:
    queue = [
        make_request(str(index), arrival_s, digest, priority=priority)
        for index, (arrival_s, digest, priority) in enumerate(arrivals)
    ]
    view = {"in_use": {"h", "i"}, "sizes": (num_waiting, num_running)}
    order = in_order(clustered(FIRST_COME, 2, 5.0, min_queue=0.5), queue, 10.0, **view)
    unbounded = in_order(clustered(FIRST_COME, 2, 5.0, min_queue=0.0), queue, 10.0, **view)
    is_short = num_waiting < 0.5 * num_running
    assert order == (in_order(FIRST_COME, queue, 10.0) if is_short else unbounded)


def test_clustering_reorders_neither_tenants_nor_priorities() -> None:
    counters = ServiceCounters()
    queue = [
        make_request("served less", 1.0, "n", tenant="globex"),
        make_request("urgent", 2.0, "n", tenant="acme", priority=-1),
        make_request("new", 3.0, "n", tenant="acme"),
        make_request("hot", 4.0, "h", tenant="acme"),
    ]
    for request in queue:
        counters.arrive(request)
    counters.charge(queue[1], 10, 0)
    plain = [request.request_id for request in queue]
    assert in_order(fair(counters), queue, 5.0, {"h"}) in (plain, [*plain[:2], "hot", "new"])
    order = clustered(fair(counters), 1)
    assert in_order(order, queue, 5.0, {"h"}) == [*plain[:2], "hot", "new"]


@given(
    st.lists(st.tuples(st.sampled_from("tu"), st.sampled_from("hikl")), min_size=2, max_size=40),
    st.integers(1, 3),
)
def test_who_would_be_next_is_passed_over_no_longer_than_the_bound(
    arrivals: list[tuple[str, str]], cluster_size: int
) -> None:
    """One request a second comes and one in two seconds goes, the hot adapters' preferred."""
    counters = ServiceCounters()
    plain = fair(counters)
    policy = clustered(plain, cluster_size, max_age_s=5.0, min_queue=0.0)
    queue: list[Request] = []
    for now in range(2 * len(arrivals)):
        if now < len(arrivals):
            tenant, digest = arrivals[now]
            queue.append(make_request(f"{now}", float(now), digest, tenant=tenant))
            counters.arrive(queue[-1])
        if now % 2 or not queue:
            continue
        view = QueueView(float(now), set("hik"[:cluster_size]), len(queue), 1)
        chosen = min(queue, key=lambda request: policy.key(request, view))
        due = min(queue, key=lambda request: plain.key(request, view))
        assert chosen is due or now - due.arrival_s < 5.0
        assert chosen.tenant == due.tenant
        queue.remove(chosen)
        counters.charge(chosen, 1, 1)


def test_the_bare_base_counts_as_running() -> None:
    queue = [make_request("new", 1.0, "n"), make_request("base", 2.0)]
    order = clustered(FIRST_COME, 1, max_age_s=5.0)
    assert in_order(order, queue, 3.0, {"h"}) == ["base", "new"]


def test_idle_time_earns_no_credit() -> None:
    counters = ServiceCounters()
    busy, sleeper = (make_request(name, 0.0, tenant=name) for name in ("busy", "sleeper"))
    counters.arrive(busy)
    counters.charge(busy, 100, 0)
    counters.arrive(sleeper)
    tenants = (counters.accounts(request)[0] for request in (sleeper, busy))
    assert len({account.served for account in tenants}) == 1


def test_one_tenants_adapters_share_its_service() -> None:
    counters = ServiceCounters()
    order = fair(counters)
    queue = [
        make_request("hot", 1.0, "h", tenant="t"),
        make_request("cold", 2.0, "c", tenant="t"),
        make_request("other", 3.0, "h", tenant="u"),
    ]
    for request in queue:
        counters.arrive(request)
    counters.charge(queue[0], 50, 0)
    assert in_order(order, queue, 4.0) == ["other", "cold", "hot"]


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 50), st.sampled_from([1.0, 2.0])),
        min_size=40,
        max_size=40,
    ),
    st.booleans(),
)
def test_the_backlogged_are_served_in_proportion(
    sizes: list[tuple[int, int, float]], by_adapter: bool
) -> None:
    """Always serving the first of the order keeps any two counters within one request's cost,
    between tenants and between the adapters of one tenant."""
    counters = ServiceCounters()
    order = fair(counters)
    queue = [
        make_request(
            f"{index}",
            float(index),
            digest=f"d{index % 2}" if by_adapter else "",
            tenant="t" if by_adapter else f"t{index % 2}",
            fairness_weight=weight,
        )
        for index, (_, _, weight) in enumerate(sizes)
    ]
    for request in queue:
        counters.arrive(request)
    rivals = queue[:2]
    bound = max(num_input + 2 * num_output for num_input, num_output, _ in sizes)
    left = queue.copy()
    while len({(request.tenant, request.adapters) for request in left}) == 2:
        [chosen, *_] = sorted(left, key=lambda request: order.key(request, QueueView(0.0, ())))
        left.remove(chosen)
        num_input, num_output, _ = sizes[int(chosen.request_id)]
        counters.charge(chosen, num_input, num_output)
        served = [counters.accounts(request)[by_adapter].served for request in rivals]
        assert abs(served[0] - served[1]) <= bound
