"""Adapters load ahead of the requests that cannot start yet, and cost those that run nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.api.residency import Tier
from loraplex_services.worker.scheduling.lookahead import HORIZON_STEPS, NUM_REQUESTS
from loraplex_services.worker.types.step_plan import StepPlan
from tests.worker.scheduling.stage import SIZES, Stage, make_request

DIGESTS = sorted(SIZES)


def test_the_next_adapter_loads_while_the_batch_is_full() -> None:
    """198 of 200 blocks are free."""
    stage = Stage(200, max_running=2)
    stage.submit(make_request("one", 3, 20), make_request("two", 3, 20))
    stage.step()
    stage.fetch("sha256:a")
    stage.submit(make_request("next", digests=("sha256:a",)))
    assert stage.arena.num_free == 198
    stage.step()
    assert stage.scheduler.num_running == 2 and stage.cache.ready(["sha256:a"])
    while "one" not in stage.finished:
        stage.step()
    assert "next" in [row.request.request_id for row in stage.step().rows]


def test_the_next_adapter_loads_while_the_forecast_is_full() -> None:
    """22 of 24 blocks are free, and the forecast needs 21 of them."""
    stage = Stage(24, max_step_tokens=64)
    stage.submit(make_request("runs", 3, 80))
    stage.step()
    stage.fetch("sha256:b")
    stage.submit(make_request("next", 8, 40, ("sha256:b",)))
    assert stage.arena.num_free >= 22
    stage.step()
    assert stage.scheduler.is_full and stage.scheduler.num_running == 1
    assert stage.cache.ready(["sha256:b"])


def test_the_first_requests_of_the_queue_come_first_where_memory_is_short() -> None:
    stage = Stage(30, max_running=1, copy_steps=1000, prefix_cache=False)
    stage.submit(make_request("runs", 3, 90))
    stage.step()
    stage.fetch(*DIGESTS)
    order = [DIGESTS[index] for index in (3, 4, 2, 0)]  # of 4, 6, 3 and 1 blocks
    stage.submit(*(make_request(digest, digests=(digest,)) for digest in order))
    stage.step()
    assert {d for d in DIGESTS if stage.cache.tier(d) == Tier.LOADING} == set(order)
    stage.scheduler.remove(order[0], stage.now)
    stage.step()
    assert stage.cache.tier(DIGESTS[1]) == Tier.DISK, "nobody waits for it"


def test_requests_behind_the_first_ones_are_not_looked_at() -> None:
    stage = Stage(200, max_running=1)
    stage.submit(make_request("runs", 3, 50))
    stage.step()
    stage.fetch("sha256:a")
    stage.submit(*(make_request(f"base{i}") for i in range(NUM_REQUESTS)))
    stage.submit(make_request("far", digests=("sha256:a",)))
    stage.step()
    assert stage.cache.tier("sha256:a") == Tier.DISK
    stage.scheduler.remove("base0", stage.now)
    stage.step()
    assert stage.cache.ready(["sha256:a"])


def test_nothing_loads_ahead_into_blocks_that_running_requests_will_want_soon() -> None:
    stage = Stage(8, max_running=1, prefix_cache=False)
    stage.submit(make_request("runs", 3, 25))
    stage.step()  # one block; within the horizon it may have three
    assert HORIZON_STEPS == 6
    stage.fetch("sha256:e", "sha256:d")  # 6 and 4 blocks
    stage.submit(make_request("next", 4, 4, ("sha256:e",)))
    stage.submit(make_request("after", 4, 4, ("sha256:d",)))
    stage.step()
    assert stage.cache.tier("sha256:e") == Tier.DISK
    assert stage.cache.ready(["sha256:d"]), "which is small enough"


def test_an_adapter_loaded_ahead_outlives_idle_ones_and_gives_way_to_what_runs() -> None:
    stage = Stage(21, max_running=1, prefix_cache=False)
    stage.fetch("sha256:d", "sha256:c")
    stage.submit(make_request("old", 1, 1, ("sha256:d",)))
    stage.run_dry()
    for _ in range(3):  # the other one is used more
        stage.cache.acquire(["sha256:d"], stage.now)
        stage.cache.release(["sha256:d"], stage.now)
    stage.submit(make_request("runs", 1, 60))
    stage.step()
    stage.submit(make_request("next", 4, 4, ("sha256:c",)))
    stage.step()
    assert stage.cache.ready(DIGESTS[2:4])
    while "runs" not in stage.finished:
        stage.step()
        assert stage.cache.ready(["sha256:c"])
    assert stage.cache.tier("sha256:d") == Tier.DISK and not stage.scheduler.num_preemptions


def test_an_adapter_that_was_overtaken_is_not_spared_any_more() -> None:
    stage = Stage(200, max_running=1)
    stage.fetch("sha256:a")
    stage.submit(make_request("runs", 3, 50))
    stage.step()
    stage.submit(make_request("next", digests=("sha256:a",)))
    stage.step()
    assert set(stage.reclaimer.spared) == {"sha256:a"}
    stage.scheduler.remove("next", stage.now)
    stage.step()
    assert not stage.reclaimer.spared


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 20),
            st.integers(1, 40),
            st.sampled_from([(), *((digest,) for digest in DIGESTS), tuple(DIGESTS[:2])]),
            st.integers(0, 6),
        ),
        min_size=5,
        max_size=25,
    ),
    num_blocks=st.integers(26, 60),
    copy_steps=st.integers(0, HORIZON_STEPS - 1),
    num_tenants=st.integers(1, 2),
    overlaps=st.booleans(),
)
def test_running_requests_lose_nothing_to_adapters_that_load_ahead(
    requests: list[tuple[int, int, tuple[str, ...], int]],
    num_blocks: int,
    copy_steps: int,
    num_tenants: int,
    overlaps: bool,
) -> None:
    """No request is preempted while blocks fill ahead of time, no adapter of the next requests
    leaves while another is idle, whoever decodes is in every step, and no block is lost."""
    stage = Stage(
        num_blocks,
        prefix_cache=False,
        overlaps=overlaps,
        copy_steps=copy_steps,
        max_running=3,
    )
    stage.fetch(*DIGESTS)
    plan = StepPlan(-1, ())
    numbers = iter(range(len(requests)))
    while (number := next(numbers, None)) is not None or stage.scheduler.has_work:
        num_steps = 1
        if number is not None:
            num_prompt, max_tokens, digests, num_steps = requests[number]
            tenant = f"t{number % num_tenants}"
            stage.submit(make_request(f"r{number}", num_prompt, max_tokens, digests, tenant=tenant))
        for _ in range(num_steps):
            plan = step_safely(stage, plan)
        assert stage.now < 5000, "requests wait for ever"
    held = sum(a.num_pages for a in stage.cache.adapters() if a.slot >= 0)
    assert stage.arena.num_free + stage.arena.num_retiring + held == num_blocks


def step_safely(stage: Stage, last: StepPlan) -> StepPlan:
    """One step after `last`; fails if it cost something that it should not have."""
    is_ahead = bool(stage.copies) and not stage.scheduler.awaiting_copies
    ended = set(stage.finished)
    num_preemptions = stage.scheduler.num_preemptions
    plan = stage.step()
    if stage.scheduler.num_preemptions > num_preemptions:
        assert not is_ahead, "a block of a load ahead was wanted"
        return plan
    assert not stage.wronged, "something else was idle"
    if not stage.overlaps:
        rows = {row.request.request_id for row in plan.rows}
        decoded = {row.request.request_id for row in last.rows if row.needs_logits}
        assert decoded <= rows | ended, "a request that decodes was left out"
    return plan
