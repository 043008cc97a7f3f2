"""The scheduler under every order of events, with integrity checked after every step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from loraplex.api.pooling import Pooling
from loraplex.errors import DeadlineExceeded, ResourceExhausted
from loraplex_services.worker.types.request import RELEASED_BLOCK, Request
from tests.worker.scheduling.stage import SIZES, TOKEN, AnyToken, Stage, make_request

CLUSTERS = {"cluster_size": 2, "max_cluster_age_s": 8.0, "min_cluster_queue": 0.0}


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, fetches, cancels, pins and steps in any order; at the end everything drains."""

    stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self.stage = self.make_stage()
        self.live: dict[str, Request] = {}
        self.count = 0

    def make_stage(self) -> Stage:
        return Stage(max_loras=3)

    @initialize(overlaps=st.booleans())
    def choose(self, overlaps: bool) -> None:
        self.stage.overlaps = overlaps

    @rule(
        num_prompt=st.integers(1, 40),
        branch=st.integers(0, 40),
        salt=st.sampled_from(["", "t0", "t1"]),
        num_done=st.integers(0, 3),
        max_tokens=st.integers(4, 30),
        digests=st.sets(st.sampled_from(sorted(SIZES)), max_size=2),
        priority=st.integers(0, 1),
        has_grammar=st.booleans(),
        pooling=st.sampled_from([Pooling.NONE, Pooling.NONE, Pooling.LAST, Pooling.MEAN]),
    )
    def submit(
        self,
        num_prompt: int,
        branch: int,
        salt: str,
        num_done: int,
        max_tokens: int,
        digests: set[str],
        priority: int,
        has_grammar: bool,
        pooling: Pooling,
    ) -> None:
        """Prompts are ones, and twos from `branch` on: they begin alike."""
        self.count += 1
        request = make_request(
            f"r{self.count}",
            num_prompt,
            0 if pooling else max_tokens,
            tuple(digests),
            prompt_ids=[1 if position < branch else 2 for position in range(num_prompt)],
            cache_salt=salt,
            priority=priority,
            output_ids=[] if pooling else [TOKEN] * num_done,
            constraint=AnyToken(self.count % 2 == 0) if has_grammar and not pooling else None,
            pooling=pooling,
            tenant=f"t{self.count % 2}",
        )
        self.live[request.request_id] = request
        self.stage.submit(request)

    @rule(digest=st.sampled_from(sorted(SIZES)))
    def fetched(self, digest: str) -> None:
        self.stage.fetch(digest)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live.pop(request_id)
        self.stage.scheduler.remove(request_id, self.stage.now)
        assert request.block_tables == []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.stage.stopping.add(data.draw(st.sampled_from(sorted(self.live))))

    @rule(digest=st.sampled_from(sorted(SIZES)), pinned=st.booleans())
    def pin(self, digest: str, pinned: bool) -> None:
        cache = self.stage.cache
        if not pinned:
            cache.unpin(digest)
        elif cache.known([digest]):
            try:
                cache.pin(digest, self.stage.now)
            except ResourceExhausted:
                assert cache.pinned_blocks + SIZES[digest] > 4

    @rule(digest=st.sampled_from(sorted(SIZES)))
    def unload(self, digest: str) -> None:
        self.stage.cache.unload(digest)

    @rule(num_steps=st.integers(1, 5))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.stage.step()
        for request_id in (*self.stage.finished, *self.stage.lost):
            self.live.pop(request_id, None)

    @invariant()
    def everything_agrees(self) -> None:
        self.stage.scheduler.check_integrity()

    def teardown(self) -> None:
        self.stage.fetch(*SIZES)
        self.stage.run_dry()
        assert (
            self.stage.arena.num_free
            + self.stage.prefixes.num_idle
            + self.stage.prefixes.states.idle_blocks(())
            + sum(a.num_pages for a in self.stage.cache.adapters() if a.slot >= 0)
            == self.stage.arena.num_blocks
        )


class ClusteredWindowsMachine(SchedulerMachine):
    """The same with a windowed KV group and adapter clustering."""

    def make_stage(self) -> Stage:
        return Stage(40, (None, 6), **CLUSTERS)


class TwoGroupsMachine(SchedulerMachine):
    """The same with two KV groups."""

    def make_stage(self) -> Stage:
        return Stage(48, (None, None), rope_switch_len=14)


class RecurrentMachine(SchedulerMachine):
    """The same with recurrent states, of which the prefix cache keeps snapshots."""

    def make_stage(self) -> Stage:
        return Stage(60, state_blocks=3, max_loras=3)


for machine in (
    SchedulerMachine,
    ClusteredWindowsMachine,
    TwoGroupsMachine,
    RecurrentMachine,
):
    machine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestScheduler = SchedulerMachine.TestCase
TestClusteredWindows = ClusteredWindowsMachine.TestCase
TestTwoGroups = TwoGroupsMachine.TestCase
TestRecurrent = RecurrentMachine.TestCase


def test_an_activated_adapter_shares_what_lies_before_its_invocation_with_the_base() -> None:
    stage = Stage()
    digest = "sha256:a"
    stage.fetch(digest)
    prompt = list(range(1, 15))
    cached = []
    for name, digests, adapters_from in (
        ("base", (), 0),
        ("invoked at 9", (digest,), 9),
        ("invoked at 5", (digest,), 5),
        ("at 9 again", (digest,), 9),
        ("plain", (digest,), 0),
    ):
        request = make_request(name, 14, 1, digests, prompt_ids=prompt, adapters_from=adapters_from)
        stage.submit(request)
        while name not in stage.finished:
            stage.step()
        cached.append(request.num_cached)
    assert cached == [0, 8, 4, 12, 0]


def test_prompts_and_decodes_of_any_adapter_share_a_step() -> None:
    stage = Stage()
    stage.fetch("sha256:a", "sha256:b")
    stage.submit(make_request("base", 2), make_request("a", 2, digests=("sha256:a",)))
    stage.step()
    stage.submit(make_request("b", 9, digests=("sha256:b",)))
    stage.step()
    plan = stage.step()
    assert {row.request.request_id for row in plan.rows} == {"base", "a", "b"}
    assert plan.num_contexts == 1 and plan.rows[0].request.request_id == "b"
    assert plan.rows[-1].slots == ()


def test_a_long_prompt_is_cut_by_the_token_budget_and_never_delays_decodes() -> None:
    stage = Stage(num_blocks=64)
    stage.submit(make_request("short", 2, 20))
    stage.step()
    stage.submit(make_request("long", 40))
    plans = [stage.step() for _ in range(3)]
    assert [[row.num_tokens for row in plan.rows] for plan in plans] == [[15, 1], [15, 1], [10, 1]]
    assert [plan.rows[0].needs_logits for plan in plans] == [False, False, True]


def test_short_prompts_start_along_with_a_long_one_and_other_long_ones_after_it() -> None:
    stage = Stage(num_blocks=64)
    stage.submit(make_request("long", 40))
    stage.step()
    stage.submit(passed_over := make_request("next", prompt_ids=[2] * 40))
    stage.submit(make_request("short", prompt_ids=[3] * 6))
    plans = [stage.step()]
    assert passed_over.adapters_ready_s is not None, "its adapters are kept and wait for nothing"
    plans += [stage.step() for _ in range(2)]
    rows = [{row.request.request_id: row.num_tokens for row in plan.rows} for plan in plans]
    assert rows[0] == {"long": 10, "short": 6}, "what the short one leaves is the long one's"
    assert rows[1] == {"long": 14, "short": 1, "next": 1}
    assert rows[2] == {"long": 1, "next": 14, "short": 1}


def test_a_request_whose_adapter_is_not_here_does_not_block_its_neighbours() -> None:
    stage = Stage()
    stage.submit(make_request("cold", digests=("sha256:a",)), make_request("base"))
    assert [row.request.request_id for row in stage.step().rows] == ["base"]
    assert not stage.scheduler.is_full


def test_prompts_beyond_the_token_budget_make_a_worker_full_until_they_started() -> None:
    stage = Stage()
    stage.submit(make_request("a", 16), make_request("b", 8))
    stage.step()
    assert stage.scheduler.is_full
    stage.step()
    assert not stage.scheduler.is_full


def test_max_loras_limits_the_distinct_adapters_of_a_step() -> None:
    stage = Stage(max_loras=1)
    stage.fetch("sha256:a", "sha256:b")
    stage.submit(*(make_request(d, digests=(d,)) for d in ("sha256:a", "sha256:b")))
    while stage.scheduler.has_work:
        assert stage.step().num_distinct_adapters <= 1
    assert stage.finished == ["sha256:a", "sha256:b"]


def test_overtaking_by_hot_adapters_ends_after_its_bound() -> None:
    stage = Stage(max_loras=1, max_overtaking_s=5)
    stage.fetch("sha256:a", "sha256:b")
    stage.submit(make_request("first", digests=("sha256:a",)))
    stage.step()
    stage.submit(make_request("cold", digests=("sha256:b",)))
    for index in range(30):
        stage.submit(make_request(f"hot{index}", digests=("sha256:a",)))
        stage.step()
    assert "cold" in stage.finished
    assert stage.now < 40


def test_idle_adapters_leave_before_a_request_is_preempted() -> None:
    stage = Stage(num_blocks=8)
    stage.fetch("sha256:e")
    stage.submit(make_request("a", digests=("sha256:e",)))
    stage.run_dry()
    assert stage.cache.idle_blocks(()) == 6
    stage.submit(make_request("big", 20, 10))
    stage.run_dry()
    assert stage.scheduler.num_preemptions == 0 and stage.cache.idle_blocks(()) == 0


def test_the_request_that_arrived_last_is_preempted_and_resumes_with_its_output() -> None:
    stage = Stage(num_blocks=20, max_step_tokens=4, max_running=4)
    stage.submit(make_request("old", 1, 40))
    young = make_request("young", 60, 4)
    stage.submit(young)
    while not stage.scheduler.num_preemptions:
        stage.step()
    assert young.block_tables == [] and young.num_computed == 0
    stage.run_dry()
    assert stage.finished == ["old", "young"] and len(young.output_ids) == 4


def test_admission_waits_while_the_forecast_peak_does_not_fit() -> None:
    stage = Stage(num_blocks=8)
    stage.submit(make_request("one", 4, 16), make_request("two", 4, 16))
    assert [row.request.request_id for row in stage.step().rows] == ["one"]
    assert stage.scheduler.is_full
    stage.run_dry()
    assert stage.finished == ["one", "two"] and stage.scheduler.num_preemptions == 0
    assert not stage.scheduler.is_full


def test_a_request_that_can_never_fit_is_given_up_with_the_numbers() -> None:
    stage = Stage(num_blocks=8)
    stage.submit(make_request("huge", 30, 30))
    [(request, error)] = stage.scheduler.expired(0.0)
    assert request.request_id == "huge" and "15 arena blocks for 60 tokens" in error.message


def test_a_passed_deadline_ends_waiting_and_running_requests() -> None:
    stage = Stage()
    stage.submit(make_request("runs", 3, 50, deadline_s=3.0))
    stage.submit(make_request("waits", digests=("sha256:a",), deadline_s=3.0))
    stage.step()
    assert stage.scheduler.expired(2.9) == []
    lost = stage.scheduler.expired(3.0)
    assert {request.request_id for request, _ in lost} == {"waits", "runs"}
    assert all(isinstance(error, DeadlineExceeded) for _, error in lost)


def test_cancelling_frees_the_blocks_at_once() -> None:
    stage = Stage()
    stage.submit(make_request("a", 12, 20))
    stage.step()
    assert stage.arena.num_free < 24
    stage.scheduler.remove("a", stage.now)
    assert stage.arena.num_free + stage.reclaimer.idle_blocks() == 24


def test_windowed_groups_free_what_the_window_has_passed() -> None:
    stage = Stage(num_blocks=40, windows=(None, 6))
    request = make_request("a", 30, 10)
    stage.submit(request)
    for _ in range(4):
        stage.step()
    full, windowed = request.block_tables
    assert RELEASED_BLOCK not in full
    assert windowed.count(RELEASED_BLOCK) == (request.num_computed - 1 - 5) // 4


@settings(max_examples=25, deadline=None)
@given(
    hot=st.lists(st.tuples(st.integers(1, 30), st.integers(2, 12)), min_size=90, max_size=90),
    max_loras=st.integers(1, 3),
    clusters=st.booleans(),
)
def test_no_stream_of_hot_requests_starves_a_cold_one(
    hot: list[tuple[int, int]], max_loras: int, clusters: bool
) -> None:
    """Hot adapters fill every step; a cold request that came first ages, and then they drain.

    The longest drain: six running requests of 30 + 12 tokens at 16 tokens a step, then 12 decodes.
    """
    max_age_s, longest_drain, own_steps = 6.0, 6 * 30 // 16 + 1 + 12, 6
    limits = CLUSTERS | {"cluster_size": max_loras, "max_cluster_age_s": max_age_s}
    bounds = {"max_loras": max_loras, "max_overtaking_s": max_age_s}
    stage = Stage(60, **bounds, **(limits if clusters else {}))
    stage.fetch(*SIZES)
    digests = sorted(SIZES)[:max_loras]
    for index, digest in enumerate(digests):
        stage.submit(make_request(f"first{index}", 2, 12, (digest,)))
    stage.step()
    stage.step()
    stage.submit(make_request("cold", 8, 4, ("sha256:e",)))
    came = stage.now
    for index, (num_prompt, max_tokens) in enumerate(hot):
        digest = digests[index % max_loras]
        stage.submit(make_request(f"hot{index}", num_prompt, max_tokens, (digest,)))
        stage.step()
        if "cold" in stage.finished:
            break
    assert "cold" in stage.finished
    assert stage.now - came <= max_age_s + longest_drain + own_steps


def test_behind_a_request_that_is_no_longer_overtaken_adapters_load_and_nobody_starts() -> None:
    stage = Stage(max_overtaking_s=5)
    digests = ("sha256:a", "sha256:b", "sha256:d")
    stage.submit(*(make_request(digest, digests=(digest,)) for digest in digests))
    for _ in range(5):
        stage.step()
    stage.fetch(*digests)
    stage.submit(make_request("base"))
    assert stage.step().rows == ()
    assert stage.cache.ready(digests)
    assert len(stage.step().rows) == 4
