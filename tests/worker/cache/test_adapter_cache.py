"""Residency decisions under every order of events, with the engine's side played straight."""

import dataclasses
import math
import random
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.api.residency import Tier
from loraplex.errors import DataLoss, ResourceExhausted
from loraplex_services.worker.cache.adapter_cache import AdapterCache
from loraplex_services.worker.cache.adapter_limits import AdapterLimits
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.types.residency import Evict, Load

NUM_BLOCKS, MAX_RESIDENT = 20, 4
SIZES = {
    f"sha256:{name}": size for name, size in zip("abcdefg", (1, 2, 3, 4, 5, 6, 9), strict=True)
}
DIGESTS = st.sampled_from(sorted(SIZES))


def make_cache(reclaimer: Reclaimer, arena: Arena, **overrides: float) -> AdapterCache:
    limits = AdapterLimits(MAX_RESIDENT, max_adapter_blocks=8, max_pinned_blocks=10)
    return AdapterCache(arena, reclaimer, dataclasses.replace(limits, **overrides))


def fetch(cache: AdapterCache, digest: str) -> None:
    cache.fetched(digest, Path("/cache") / digest, SIZES[digest], max_rank=8)


def carry_out(cache: AdapterCache) -> list[Load | Evict]:
    actions = cache.take_actions()
    for action in actions:
        if isinstance(action, Load):
            cache.loaded(action.digest)
    return actions


class CacheMachine(RuleBasedStateMachine):
    """Drives the cache as scheduler and engine do and mirrors the device's slot table."""

    pages_per_block = 1
    max_blocks: float = math.inf

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NUM_BLOCKS // self.pages_per_block, self.pages_per_block)
        self.reclaimer = Reclaimer(self.arena)
        self.cache = make_cache(self.reclaimer, self.arena, max_blocks=self.max_blocks)
        self.now = 0.0
        self.table: dict[int, str] = {}
        self.users: dict[str, int] = {}
        self.kv: list[int] = []

    def usable(self) -> list[str]:
        return [d for d in SIZES if self.cache.ready([d])]

    @rule(digest=DIGESTS)
    def fetched(self, digest: str) -> None:
        num_blocks = SIZES[digest] / self.pages_per_block
        if num_blocks > min(8, self.max_blocks):
            with pytest.raises(ResourceExhausted, match=f"needs {math.ceil(num_blocks)} arena"):
                fetch(self.cache, digest)
        else:
            fetch(self.cache, digest)

    @rule(digest=DIGESTS)
    def gone(self, digest: str) -> None:
        self.cache.gone(digest)

    @rule(digest=DIGESTS, protected=st.sets(DIGESTS, max_size=3))
    def load(self, digest: str, protected: set[str]) -> None:
        self.now += 1
        if not self.cache.known([digest]):
            return
        before = self.usable()
        placed = self.cache.load([digest], protected, self.now)
        for name in before:
            assert name not in protected or self.cache.ready([name]), f"{name} was protected"
        if not placed:
            held = [a for a in self.cache.adapters() if a.slot >= 0 and not a.is_idle]
            guarded = [d for d in self.usable() if d in protected]
            assert held or guarded or self.kv, "refused although everything was idle"

    @rule(fails=st.booleans())
    def step(self, fails: bool) -> None:
        for action in self.cache.take_actions():
            if isinstance(action, Evict):
                assert self.table.pop(action.slot) == action.digest
                assert not self.users.get(action.digest), "evicted under a running request"
            else:
                assert action.slot not in self.table, "loaded over a slot in use"
                assert action.extents.num_pages == SIZES[action.digest]
                if fails:
                    self.cache.failed(action.digest, DataLoss("damaged"), self.now)
                else:
                    self.table[action.slot] = action.digest
                    self.cache.loaded(action.digest)
        self.cache.take_changes()

    @precondition(lambda self: self.usable())
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.usable()))
        self.cache.acquire([digest], self.now)
        self.users[digest] = self.users.get(digest, 0) + 1

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from([d for d, n in self.users.items() if n]))
        self.cache.release([digest], self.now)
        self.users[digest] -= 1

    @rule(digest=DIGESTS, pinned=st.booleans())
    def pin(self, digest: str, pinned: bool) -> None:
        if not pinned:
            self.cache.unpin(digest)
        elif self.cache.known([digest]):
            try:
                self.cache.pin(digest, self.now)
            except ResourceExhausted:
                assert not self.cache.get(digest).pinned

    @rule(digest=DIGESTS)
    def unload(self, digest: str) -> None:
        self.cache.unload(digest)
        if not self.users.get(digest):
            adapter = self.cache.get(digest)
            assert adapter is None or adapter.tier in (Tier.DISK, Tier.LOADING)

    @rule()
    def load_prefetches(self) -> None:
        self.cache.load_prefetches((), self.now)

    @rule(count=st.integers(1, 6))
    def reclaim_for_kv(self, count: int) -> None:
        offered = self.arena.num_free + self.cache.idle_blocks(())
        assert self.reclaimer.reclaim(count, self.now) == (offered >= count)
        if offered >= count:
            self.kv += self.arena.allocate("kv", count)

    @rule()
    def free_kv(self) -> None:
        self.arena.free("kv", self.kv)
        self.kv = []

    @invariant()
    def everything_agrees(self) -> None:
        self.arena.check_integrity()
        self.cache.check_integrity()
        assert self.cache.pinned_blocks <= 10
        resident = sum(a.num_pages for a in self.cache.adapters() if a.slot >= 0)
        assert resident <= self.max_blocks * self.pages_per_block
        assert self.cache.held_blocks + self.cache.idle_blocks(()) + len(self.kv) == (
            self.arena.num_blocks - self.arena.num_free
        )


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase


class SharingCacheMachine(CacheMachine):
    """Of adapters that share blocks."""

    pages_per_block = 4


SharingCacheMachine.TestCase.settings = CacheMachine.TestCase.settings
TestSharingCache = SharingCacheMachine.TestCase


class BoundedCacheMachine(CacheMachine):
    """Of adapters that may hold a part of the arena only."""

    pages_per_block = 2
    max_blocks = 3


BoundedCacheMachine.TestCase.settings = CacheMachine.TestCase.settings
TestBoundedCache = BoundedCacheMachine.TestCase


@pytest.mark.parametrize(("block_s", "victim"), [(0.0, "sha256:c"), (1.0, "sha256:b")])
def test_evicts_what_costs_least_by_the_copies_that_were_measured(
    block_s: float, victim: str
) -> None:
    """a is used now; c is one block more than b, and one use younger. Where copies take a second a
    block, large ones gain nothing by their start and the older goes."""
    arena = Arena(6)
    reclaimer = Reclaimer(arena)
    cache = make_cache(reclaimer, arena)
    for now, digest in enumerate(["sha256:a", "sha256:b", "sha256:c"]):
        fetch(cache, digest)
        assert cache.load([digest], (), float(now))
        for action in cache.take_actions():
            assert isinstance(action, Load)
            cache.loaded(digest, block_s * action.extents.num_pages)
    cache.acquire(["sha256:a"], 9.0)
    cache.release(["sha256:a"], 9.0)
    assert reclaimer.reclaim(1, 9.0)
    assert [a.digest for a in carry_out(cache)] == [victim]


def test_an_adapter_in_use_is_never_evicted() -> None:
    arena = Arena(3)
    reclaimer = Reclaimer(arena)
    cache = make_cache(reclaimer, arena, max_adapter_blocks=3)
    fetch(cache, "sha256:c")
    cache.load(["sha256:c"], (), 0.0)
    carry_out(cache)
    cache.acquire(["sha256:c"], 1.0)
    assert not reclaimer.reclaim(1, 9.0)
    cache.release(["sha256:c"], 2.0)
    assert reclaimer.reclaim(1, 9.0)


def test_one_that_exceeds_the_share_of_adapters_is_refused_by_its_setting() -> None:
    arena = Arena(NUM_BLOCKS)
    cache = make_cache(Reclaimer(arena), arena, max_blocks=4)
    fetch(cache, "sha256:d")
    with pytest.raises(
        ResourceExhausted, match="at most 4: lower its rank or raise LORAPLEX_LORA_"
    ):
        fetch(cache, "sha256:e")


def test_an_unload_waits_for_the_last_request() -> None:
    arena = Arena(5)
    cache = make_cache(Reclaimer(arena), arena)
    fetch(cache, "sha256:b")
    cache.load(["sha256:b"], (), 0.0)
    carry_out(cache)
    cache.acquire(["sha256:b"], 1.0)
    cache.unload("sha256:b")
    assert arena.num_free == 3
    cache.release(["sha256:b"], 2.0)
    assert arena.num_free == 5
    assert [type(a) for a in cache.take_actions()] == [Evict]


def test_a_failed_copy_gives_everything_back_and_is_not_tried_again_at_once() -> None:
    arena = Arena(5)
    cache = make_cache(Reclaimer(arena), arena)
    fetch(cache, "sha256:a")
    cache.load(["sha256:a"], (), 0.0)
    cache.failed("sha256:a", DataLoss("bytes differ"), 0.0)
    assert arena.num_free == 5
    blocked = cache.failures.blocked("sha256:a", 0.9)
    assert blocked is not None and blocked.message == "bytes differ"
    assert cache.failures.blocked("sha256:a", 1.0) is None


def test_adapters_that_share_blocks_are_counted_once() -> None:
    arena = Arena(4, pages_per_block=4)
    reclaimer = Reclaimer(arena)
    cache = make_cache(reclaimer, arena)
    names = ["sha256:a", "sha256:b", "sha256:c"]  # 1, 2 and 3 pages
    for digest in names:
        fetch(cache, digest)
        assert cache.load([digest], (), 0.0)
    carry_out(cache)
    assert (arena.num_free, arena.num_split) == (2, 2)
    assert (cache.held_blocks, cache.idle_blocks(())) == (0, 2)
    cache.acquire(["sha256:a"], 1.0)
    assert (cache.held_blocks, cache.idle_blocks(())) == (1, 1)
    assert cache.idle_blocks(["sha256:c"]) == 0
    assert not reclaimer.reclaim(4, 1.0) and cache.ready(names), "nothing was freed"
    assert reclaimer.reclaim(3, 1.0) and cache.ready(["sha256:a"])


def test_an_adapter_smaller_than_a_block_evicts_idle_ones_that_share_a_block_with_others() -> None:
    arena = Arena(1, pages_per_block=4)
    reclaimer = Reclaimer(arena)
    cache = make_cache(reclaimer, arena)
    for now, digest in enumerate(["sha256:a", "sha256:c", "sha256:b"]):
        fetch(cache, digest)
        assert cache.load([digest], (), float(now))
        actions = carry_out(cache)
        if now == 0:
            cache.acquire([digest], 0.0)
    assert [type(action) for action in actions] == [Evict, Load], "c goes, a stays"
    assert cache.ready(["sha256:a", "sha256:b"]) and not cache.ready(["sha256:c"])


def test_a_block_for_others_costs_only_the_adapters_that_share_it() -> None:
    """The least used ones lie in many blocks, and each alone would free none of them."""
    arena, rng = Arena(10, pages_per_block=8), random.Random(0)
    reclaimer = Reclaimer(arena)
    cache = make_cache(reclaimer, arena, max_resident=100)
    names = [f"sha256:{number}" for number in range(26)]
    for digest in names:
        cache.fetched(digest, Path("/"), 3, max_rank=8)
        assert cache.load([digest], (), 0.0)
    carry_out(cache)
    for now, digest in enumerate(rng.sample(names, len(names))):
        cache.acquire([digest], float(now))
        cache.release([digest], float(now))
    assert arena.num_free == 0 and reclaimer.reclaim(1, 99.0)
    assert len(carry_out(cache)) <= 4


def test_adapters_that_share_a_block_are_evicted_in_the_order_of_their_loads() -> None:
    """Otherwise simulations with the same seed differ from process to process."""
    arena = Arena(1, pages_per_block=16)
    reclaimer = Reclaimer(arena)
    cache = make_cache(reclaimer, arena, max_resident=16)
    names = [f"sha256:{number}" for number in range(16)]
    for now, digest in enumerate(names):
        cache.fetched(digest, Path("/"), 1, max_rank=8)
        assert cache.load([digest], (), float(now))
    carry_out(cache)
    assert reclaimer.reclaim(1, 99.0)
    assert [action.digest for action in carry_out(cache)] == names


def test_empty_parts_of_blocks_do_not_add_up_while_others_take_blocks() -> None:
    """Each block that is taken from an adapter of 1.6 blocks leaves its other parts empty."""
    arena, rng = Arena(60, pages_per_block=8), random.Random(0)
    reclaimer = Reclaimer(arena)
    cache = make_cache(reclaimer, arena, max_resident=100)
    names = [f"sha256:{number}" for number in range(60)]
    for digest in names:
        cache.fetched(digest, Path("/"), 13, max_rank=8)
    for now in range(100):
        digest = rng.choice(names)
        assert cache.load([digest], (), float(now))
        carry_out(cache)
        cache.acquire([digest], float(now))
        cache.release([digest], float(now))
    for _ in range(20):
        assert reclaimer.reclaim(1, 100.0)
        arena.allocate("kv", 1)
        carry_out(cache)
        assert arena.num_loose <= 3 * arena.pages_per_block
    cache.check_integrity()
