"""Routing: few adapters move, no worker is overloaded, all gateways choose alike."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex_services.gateway.routing.router import (
    FREE_REQUESTS,
    LOAD_BOUND,
    SPARE_REPLICAS,
    ReplicaCounts,
    RoutingRequest,
    are_fetched,
    choose,
    load_cap,
    rendezvous_order,
    replica_count,
)
from loraplex_services.gateway.workers.view import WorkerView

WORKERS = st.lists(st.integers(0, 10_000).map(lambda i: f"w{i}"), min_size=2, unique=True)
KEYS = st.text(alphabet="0123456789abcdef", min_size=1, max_size=8)


def _view(name: str, in_flight: int = 0, **fields: object) -> WorkerView:
    view = WorkerView(name, name, "base", connected=True, ready=True, in_flight=in_flight)
    return replace(view, **fields)


def _routing_request(key: str, num_replicas: int = 1) -> RoutingRequest:
    return RoutingRequest(key, (key,), num_prompt_tokens=10, num_replicas=num_replicas)


def test_adapters_are_fetched_where_one_worker_that_takes_requests_has_them_all() -> None:
    on, off = AdapterResidency("a", Tier.DEVICE), AdapterResidency("b", Tier.DISK)
    views = [_view("w0", adapters={"a": on, "b": off}), _view("w1", requested=frozenset({"c"}))]
    assert are_fetched(views, ["a", "b"]) and are_fetched(views, [])
    assert not are_fetched(views, ["a", "c"])
    assert not are_fetched(views, ["c"]), "it was only asked for"
    assert not are_fetched([replace(views[0], draining=True), views[1]], ["a"])
    assert are_fetched([], ["a"])


def test_workers_of_one_id_at_different_addresses_are_all_used() -> None:
    """As on sockets of the same name in two folders."""
    idle, busy = _view("w"), _view("w", 100, address="other")
    for views in ([idle, busy], [busy, idle]):
        assert choose(views, _routing_request("x", 0)) == idle
        assert choose(views, _routing_request("x")) == idle


@given(workers=WORKERS, key=KEYS)
def test_losing_a_worker_moves_nothing_else(workers: list[str], key: str) -> None:
    order = rendezvous_order(key, workers)
    for gone in workers:
        left = rendezvous_order(key, [w for w in workers if w != gone])
        assert left == [w for w in order if w != gone]


@given(workers=WORKERS, key=KEYS, seed=st.integers())
def test_order_does_not_depend_on_how_workers_are_listed(
    workers: list[str], key: str, seed: int
) -> None:
    shuffled = list(workers)
    random.Random(seed).shuffle(shuffled)
    assert rendezvous_order(key, workers) == rendezvous_order(key, shuffled)
    views = [_view(worker, place % 3) for place, worker in enumerate(workers)]
    mixed = list(views)
    random.Random(seed).shuffle(mixed)
    assert choose(views, _routing_request(key, 2)) == choose(mixed, _routing_request(key, 2))


def test_keys_spread_evenly() -> None:
    firsts = Counter(rendezvous_order(str(key), "abcd")[0] for key in range(4000))
    assert max(firsts.values()) < 1.15 * 1000


@given(
    loads=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    key=KEYS,
    num_replicas=st.integers(0, 4),
)
def test_nobody_is_loaded_beyond_the_bound(loads: list[int], key: str, num_replicas: int) -> None:
    views = [_view(f"w{place}", load) for place, load in enumerate(loads)]
    chosen = choose(views, _routing_request(key, num_replicas))
    assert chosen is not None
    bound = math.ceil(LOAD_BOUND * (sum(loads) + 1) / len(loads))
    assert chosen.num_requests + 1 <= max(bound, FREE_REQUESTS)


def test_one_hot_adapter_fills_the_fleet_evenly() -> None:
    loads = dict.fromkeys("abcd", 0)
    for _ in range(200):
        views = [_view(name, load) for name, load in loads.items()]
        chosen = choose(views, _routing_request("hot"))
        assert chosen is not None
        loads[chosen.worker_id] += 1
    assert max(loads.values()) <= math.ceil(LOAD_BOUND * 200 / 4)


def test_cold_adapters_stay_on_one_worker() -> None:
    sizes = ReplicaCounts()
    assert [sizes.start("cold", 4) for _ in range(4)] == [1, 1, 1, 1]
    num_replicas = set()
    for load in range(FREE_REQUESTS - 1):
        chosen = choose([_view(name, load) for name in "abcd"], _routing_request("cold"))
        assert chosen is not None
        num_replicas.add(chosen.worker_id)
    assert len(num_replicas) == 1


@given(key=KEYS, holder=st.sampled_from("abcd"))
def test_of_replicas_without_the_adapter_on_the_device_the_one_with_it_on_the_host_is_chosen(
    key: str, holder: str
) -> None:
    tiers = dict.fromkeys("abcd", Tier.DISK) | {holder: Tier.HOST}
    views = [_view(name, adapters={key: AdapterResidency(key, t)}) for name, t in tiers.items()]
    chosen = choose(views, _routing_request(key, num_replicas=4))
    assert chosen is not None and chosen.worker_id == holder


def test_home_prefers_the_worker_that_already_holds_the_adapter() -> None:
    order = rendezvous_order("x", "abcd")
    held = {"x": AdapterResidency("x", Tier.DEVICE)}
    views = [_view(name, adapters=held if name == order[1] else {}) for name in "abcd"]
    assert choose(views, _routing_request("x", num_replicas=2)) == views["abcd".index(order[1])]


def test_workers_that_cannot_take_requests_are_left_out() -> None:
    views = [
        _view("a", connected=False),
        _view("b", ready=False),
        _view("c", draining=True),
    ]
    assert choose(views, _routing_request("x")) is None
    good = _view("d")
    assert choose([*views, good], _routing_request("x")) == good


def test_stale_worker_is_chosen_only_when_there_is_no_other() -> None:
    stale = _view("a", stale=True)
    assert choose([stale, _view("b", 5)], _routing_request("x", num_replicas=0)) == _view("b", 5)
    assert choose([stale], _routing_request("x")) == stale


def test_continuation_prefers_equal_arithmetic() -> None:
    same, other = _view("a", 3, numerics="n1"), _view("b", 0, numerics="n2")
    request = replace(_routing_request("x", num_replicas=0), numerics="n1")
    assert choose([same, other], request) == same


def test_longer_queue_loses() -> None:
    busy = _view("a", load=WorkerLoad(queued_tokens=50_000))
    assert choose([busy, _view("b")], _routing_request("x", num_replicas=0)) == _view("b")


@given(load=st.integers(0, 500), others=st.integers(0, 500), workers=st.integers(1, 16))
def test_home_count_is_stable_at_a_steady_load(load: int, others: int, workers: int) -> None:
    count = 1
    for _ in range(40):
        count = replica_count(load, load + others, workers, count)
    assert replica_count(load, load + others, workers, count) == count
    assert 1 <= count <= workers


def test_home_set_grows_with_load_and_shrinks_slowly() -> None:
    assert replica_count(40, 40, 4, 1) == 4
    assert replica_count(10, 40, 4, 4) == 3
    assert replica_count(29, 40, 4, 3) == 3


def test_forgotten_adapters_leave_no_trace() -> None:
    sizes = ReplicaCounts()
    for _ in range(10):
        sizes.start("x", 4)
    for _ in range(10):
        sizes.end("x")
    assert sizes.start("x", 4) == 1


def test_cap_counts_the_request_to_be_routed() -> None:
    assert load_cap([_view("a", 19), _view("b", 20)]) == 25


def test_an_adapter_goes_to_a_spare_home_that_holds_it() -> None:
    order = rendezvous_order("x", "abcdef")
    held = {"x": AdapterResidency("x", Tier.LOADING)}
    views = [_view(name, adapters=held if name == order[2] else {}) for name in "abcdef"]
    assert choose(views, _routing_request("x")) == views["abcdef".index(order[2])]
    home = _view(order[0], 3, adapters={"x": AdapterResidency("x", Tier.DEVICE)})
    views = [home if view.worker_id == order[0] else view for view in views]
    assert choose(views, _routing_request("x")) == home


@given(
    loading=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    key=KEYS,
    num_replicas=st.integers(1, 3),
)
def test_a_missing_adapter_is_loaded_where_fewest_loads_are_ahead_and_never_far(
    loading: list[int], key: str, num_replicas: int
) -> None:
    queues = [
        {f"{n}": AdapterResidency(f"{n}", Tier.LOADING) for n in range(count)} for count in loading
    ]
    views = [_view(f"w{place}", adapters=queue) for place, queue in enumerate(queues)]
    chosen = choose(views, _routing_request(f"cold {key}", num_replicas))
    assert chosen is not None
    order = rendezvous_order(f"cold {key}", [view.worker_id for view in views])
    near = order[: num_replicas + SPARE_REPLICAS]
    assert chosen.worker_id in near
    assert chosen.num_loading == min(v.num_loading for v in views if v.worker_id in near)


def test_requests_for_an_adapter_that_we_just_asked_for_stay_together() -> None:
    """The worker has not said yet that it loads it, and has more to do than the others."""
    order = rendezvous_order("x", "abcd")
    asked = _view(order[1], 3, requested=frozenset("x"))
    views = [asked if name == order[1] else _view(name) for name in "abcd"]
    assert asked.tier_of("x") is Tier.LOADING and asked.num_loading == 1
    assert choose(views, _routing_request("x")) == asked
