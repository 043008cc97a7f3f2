"""Loads alongside steps: whatever comes in whatever order, books stay right and every request ends.

The engine is the real one; its runner takes virtual time for steps and copies, and refuses to
compute with an adapter that has not been entered.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.api.residency import Tier
from loraplex.api.sampling import SamplingParams
from loraplex_services.simulate.costs import Costs
from loraplex_services.simulate.runner import TimedRunner, VirtualClock
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Cancel,
    Command,
    Gone,
    Prefetch,
    UnloadAdapter,
    Unpin,
)
from tests.worker.commands import make_config, make_submit

BLOCK_BYTES, NUM_BLOCKS = 64, 40
COSTS = Costs(
    step_s=0.01,
    idle_s=0.0,
    row_s=0.001,
    many_row_s=0.0,
    prompt_s=0.0,
    token_s=0.0001,
    kv_token_s=0.0,
    adapter_byte_s=0.0,
    step_spread=0.0,
    load_s=0.0,
    load_byte_s=0.0,
    fetch_s=0.0,
    fetch_byte_s=0.0,
    request_s=0.0,
    request_p90_s=0.0,
    adapter_bytes_per_rank=BLOCK_BYTES,
    block_bytes=BLOCK_BYTES,
    tokens_per_block=4,
    repeat_begin=0.0,
    repeat_end=0.0,
)
DIGESTS = [f"sha256:{name}" for name in "abcdef"]
BLOCKS = dict(zip(DIGESTS, (1, 2, 3, 5, 8, 12), strict=True))

ADAPTER = st.sampled_from(DIGESTS)
SUBMIT = st.tuples(st.just("submit"), st.sets(ADAPTER, max_size=2), st.integers(1, 20))
ACTIONS = st.one_of(
    SUBMIT,
    SUBMIT,
    st.tuples(st.sampled_from(["unload", "gone", "prefetch", "pin", "unpin", "cancel"]), ADAPTER),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


class Stage:
    """Adapters lie on disk from the moment they are asked for, as in a worker."""

    def __init__(self, load_s: float, overlaps: bool = False) -> None:
        self.clock = VirtualClock()
        costs = {name: getattr(COSTS, name) for name in COSTS.__slots__} | {"load_s": load_s}
        arena_bytes = NUM_BLOCKS * BLOCK_BYTES
        self.runner = TimedRunner(Costs(**costs), arena_bytes, self.clock, overlaps=overlaps)
        config = make_config(max_resident=5, max_num_batched_tokens=16, max_num_seqs=4)
        self.engine = Engine(self.runner, config, self.clock)
        self.live: dict[str, tuple[str, ...]] = {}
        self.num_sent = 0

    def step(self, *commands: Command) -> None:
        output = self.engine.step(commands)
        self.engine.check_integrity()
        for token in output.tokens:
            if token.finish_reason:
                del self.live[token.request_id]
        for failure in output.failures:
            del self.live[failure.request_id]
        if not output.tokens:
            self.clock.advance(0.004)

    def submit(self, digests: set[str], num_prompt: int) -> None:
        self.num_sent += 1
        name = str(self.num_sent)
        self.live[name] = tuple(sorted(digests))
        sampling = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
        start = self.num_sent << 8
        request = make_submit(name, range(start, start + num_prompt), sampling, self.live[name])
        self.step(request, *self.fetched(self.live[name]))

    def fetched(self, digests: tuple[str, ...]) -> list[AdapterFetched]:
        return [AdapterFetched(digest, digest, 8, BLOCKS[digest]) for digest in digests]

    def act(self, kind: str, digest: str) -> None:
        used = {d for digests in self.live.values() for d in digests}
        if kind == "unload":
            self.step(UnloadAdapter(digest))
        elif kind == "gone" and digest not in used:  # the API server leases what requests use
            self.step(Gone(digest))
        elif kind in ("prefetch", "pin"):
            self.step(*self.fetched((digest,)), Prefetch(digest, pin=kind == "pin"))
        elif kind == "unpin":
            self.step(Unpin(digest))
        elif kind == "cancel" and self.live:
            name = next(iter(self.live))
            del self.live[name]
            self.step(Cancel(name))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(ACTIONS, max_size=40),
    st.sampled_from([0.0, 0.0005, 0.03, 0.4]),
    st.booleans(),
)
def test_every_request_ends_and_every_block_is_accounted_for(
    actions: list[tuple[object, ...]], load_s: float, overlaps: bool
) -> None:
    stage = Stage(load_s, overlaps)
    for action in actions:
        match action:
            case ("submit", set() as digests, int() as num_prompt):
                stage.submit(digests, num_prompt)
            case ("step", int() as count):
                for _ in range(count):
                    stage.step()
            case (str() as kind, str() as digest):
                stage.act(kind, digest)
    for digest in DIGESTS:
        stage.step(Unpin(digest))
    patience = 4000
    while stage.live:
        patience -= 1
        assert patience, f"waiting forever: {stage.live}"
        stage.step()
    stage.step(*(UnloadAdapter(digest) for digest in DIGESTS))
    for _ in range(200):
        stage.step()
    load = stage.engine.step([]).load
    assert load.free_blocks == load.total_blocks


def test_a_short_copy_makes_its_request_part_of_the_step_that_began_it() -> None:
    for load_s, num_steps in ((0.0001, 1), (0.05, 5)):
        stage = Stage(load_s)
        stage.submit(set(), 4)
        for _ in range(2):
            stage.step()
        stage.engine.scheduler.times.copies.add(load_s)
        stage.live["x"] = (DIGESTS[0],)
        sampling = SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
        request = make_submit("x", [1, 2, 3], sampling, [DIGESTS[0]])
        count = 1
        stage.step(request, *stage.fetched((DIGESTS[0],)))
        while "x" in stage.live:
            stage.step()
            count += 1
        assert (count == 1) == (num_steps == 1), (load_s, count)


@pytest.mark.parametrize("overlaps", [False, True])
def test_where_steps_overlap_the_running_ones_do_not_keep_a_step_from_waiting(
    overlaps: bool,
) -> None:
    load_s = 0.003
    stage = Stage(load_s, overlaps)
    for _ in range(3):
        stage.submit(set(), 4)
    stage.engine.scheduler.times.copies.add(0.1)  # others took longer
    stage.live["x"] = (DIGESTS[0],)
    sampling = SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
    stage.step(make_submit("x", [1], sampling, [DIGESTS[0]]), *stage.fetched((DIGESTS[0],)))
    assert (DIGESTS[0] in stage.engine.cache.in_use) == overlaps


def test_an_adapter_that_another_rank_could_not_copy_is_not_said_to_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, told, copies = Stage(load_s=0.0), list[str](), list[Future[Any]]()
    copy = stage.runner.copy_adapter

    def held(*args: Any) -> Future[Any]:
        copies.append(Future())
        return copies[-1]

    monkeypatch.setattr(stage.runner, "copy_adapter", held)
    stage.engine.adapter_loads.prefetched = lambda digest, num_pages: told.append(digest)
    stage.step(*stage.fetched((DIGESTS[0],)), Prefetch(DIGESTS[0], pin=False))
    [(load, _)] = stage.engine.adapter_loads._copying
    monkeypatch.undo()
    whole = copy(load.path, load.extents, 0.0).result()
    copies[0].set_result(replace(whole, failure=OSError("the other rank's disk is full")))
    assert told == []


def test_who_asked_for_an_adapter_ahead_hears_of_it_as_soon_as_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(load_s=0.0)
    loads, copy = stage.engine.adapter_loads, stage.runner.copy_adapter
    copies: list[tuple[Future[Any], Any]] = []
    told: list[str] = []

    def held(*args: Any) -> Future[Any]:
        copies.append((Future(), copy(*args).result()))
        return copies[-1][0]

    monkeypatch.setattr(stage.runner, "copy_adapter", held)
    loads.prefetched = lambda digest, num_pages: told.append(digest)
    stage.submit({DIGESTS[0]}, 4)
    for digest in DIGESTS[1:3]:
        stage.step(*stage.fetched((digest,)), Prefetch(digest, pin=False))
    [(demanded, first), (good, second), (bad, _)] = copies
    demanded.set_result(first)
    assert told == [], "the request itself waits for the first one"
    good.set_result(second)
    bad.set_exception(OSError("the disk is gone"))
    assert told == [DIGESTS[1]]
    stage.step()
    assert stage.engine.cache.ready(DIGESTS[:2]) and not stage.engine.cache.ready([DIGESTS[2]])
    stage.step(Prefetch(DIGESTS[1], pin=False))
    stage.step()
    assert told == [DIGESTS[1]] and not loads._prefetches


def test_an_adapter_that_is_asked_for_again_before_it_is_unloaded_stays() -> None:
    stage, digest = Stage(load_s=0.03), DIGESTS[0]
    stage.step(*stage.fetched((digest,)), Prefetch(digest, pin=False))
    stage.step(UnloadAdapter(digest))
    stage.step(Prefetch(digest, pin=False))
    assert stage.engine.cache.tier(digest) == Tier.LOADING, "the first copy has not ended"
    for _ in range(20):
        stage.step()
    assert stage.engine.cache.ready([digest])
