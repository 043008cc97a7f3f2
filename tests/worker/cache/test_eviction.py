"""Which idle adapter goes next: what the order promises, against a look at all of them."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.residency import Tier
from loraplex_services.worker.cache.eviction import CopyTimes, LeastExpectedLoss
from loraplex_services.worker.types.residency import CachedAdapter

HALF_LIFE_S = 60.0
SIZES = (1, 2, 4, 8)


def make_adapters() -> list[CachedAdapter]:
    return [
        CachedAdapter(f"sha256:{i}", Path("/"), size, 8, tier=Tier.DEVICE)
        for i, size in enumerate(SIZES)
    ]


def use(order: LeastExpectedLoss, adapter: CachedAdapter, now: float, times: int = 1) -> None:
    """Of an adapter that is not among the idle; then it is."""
    for _ in range(times):
        order.used(adapter, now)
    order.enter(adapter, CopyTimes().seconds(adapter.num_pages))


USES = st.lists(st.tuples(st.sampled_from(range(len(SIZES))), st.floats(0, 600)), max_size=60)


@given(USES, st.sets(st.sampled_from(range(len(SIZES)))))
def test_least_expected_loss_is_least_of_what_all_of_them_would_cost(
    uses: list[tuple[int, float]], spared: set[int]
) -> None:
    order, adapters = LeastExpectedLoss(HALF_LIFE_S), make_adapters()
    counts = dict.fromkeys(range(len(SIZES)), 0.0)
    idle: set[int] = set()
    times = sorted(when for _, when in uses)
    for (index, _), when in zip(uses, times, strict=True):
        if index in idle:
            order.leave(adapters[index])
        order.used(adapters[index], when)
        counts[index] += 2.0 ** ((when - 600.0) / HALF_LIFE_S)
        order.enter(adapters[index], copy_s=2.0 + SIZES[index])
        idle.add(index)
    protected = [adapters[index].digest for index in spared]
    victim = order.next_victim(protected)
    assert order.next_victim(protected) is victim, "looking changes nothing"
    left = sorted(idle - spared)
    if not left:
        assert victim is None
        return
    loss = {i: counts[i] * (2.0 + SIZES[i]) / SIZES[i] for i in left}
    assert victim is not None
    assert math.isclose(loss[int(victim.digest[7:])], min(loss.values()), rel_tol=1e-6)


def test_an_adapter_used_often_outlives_one_used_last() -> None:
    popular, fresh, *_ = make_adapters()
    popular.num_pages = fresh.num_pages
    order = LeastExpectedLoss(HALF_LIFE_S)
    use(order, popular, 0.0, times=5)
    use(order, fresh, 10.0)
    assert order.next_victim(()) is fresh


def test_old_uses_fade() -> None:
    once_popular, fresh, *_ = make_adapters()
    once_popular.num_pages = fresh.num_pages
    order = LeastExpectedLoss(HALF_LIFE_S)
    use(order, once_popular, 0.0, times=5)
    use(order, fresh, 3 * HALF_LIFE_S)
    assert order.next_victim(()) is once_popular
    assert order.uses_per_s(fresh, 3 * HALF_LIFE_S) > order.uses_per_s(fresh, 9 * HALF_LIFE_S)


def test_of_equally_used_ones_the_larger_goes_as_its_copy_costs_less_a_block() -> None:
    order, adapters = LeastExpectedLoss(HALF_LIFE_S), make_adapters()
    for adapter in adapters:
        use(order, adapter, 0.0)
    assert order.next_victim(()) is adapters[-1]


def test_what_was_loaded_ahead_and_never_used_counts_as_used_once_then() -> None:
    order, (old, ahead, *_) = LeastExpectedLoss(HALF_LIFE_S), make_adapters()
    ahead.num_pages, ahead.last_used_s = old.num_pages, 10.0
    order.enter(ahead, CopyTimes().seconds(ahead.num_pages))
    use(order, old, 0.0)
    assert order.next_victim(()) is old


def test_the_order_holds_no_more_than_twice_what_is_idle() -> None:
    order, (adapter, *_) = LeastExpectedLoss(HALF_LIFE_S), make_adapters()
    for step in range(1000):
        use(order, adapter, float(step))
        order.leave(adapter)
    assert len(order._heap) <= 66
    assert order.next_victim(()) is None
