"""The arena's accounting under every order of calls."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.types.extents import extent_sizes

NUM_BLOCKS, PAGES_PER_BLOCK = 12, 8


class ArenaMachine(RuleBasedStateMachine):
    """Allocates, frees, plans and retires against a plain model of who may hold what."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NUM_BLOCKS, PAGES_PER_BLOCK)
        self.held: dict[str, list[int]] = {}
        self.parts: dict[str, tuple[int, list[int]]] = {}
        """Number of pages and places of each adapter."""
        self.num_adapters = 0
        self.planned = -1
        self.retired = -1
        self.readable: dict[int, set[int]] = {}
        """Pages owned when each step in flight was planned."""

    def pages(self) -> set[int]:
        """All that are owned, by the model; asserts that none is owned twice."""
        owned = [
            page
            for blocks in self.held.values()
            for block in blocks
            for page in range(block * PAGES_PER_BLOCK, (block + 1) * PAGES_PER_BLOCK)
        ]
        for num_pages, positions in self.parts.values():
            for index, size in zip(
                positions, extent_sizes(num_pages, PAGES_PER_BLOCK), strict=True
            ):
                assert index % size == 0, "an extent begins at a multiple of its size"
                owned += range(index, index + size)
        assert len(owned) == len(set(owned)), "a page has two owners"
        return set(owned)

    def check_new(self, before: set[int]) -> None:
        new = self.pages() - before
        for step, readable in self.readable.items():
            assert not readable & new, f"step {step} still reads {readable & new}"

    @rule(owner=st.sampled_from("abcd"), count=st.integers(0, 5))
    def allocate(self, owner: str, count: int) -> None:
        before = self.pages()
        blocks = self.arena.allocate(owner, min(count, self.arena.num_free))
        self.held.setdefault(owner, []).extend(blocks)
        self.check_new(before)

    @rule(num_pages=st.integers(0, 3 * PAGES_PER_BLOCK))
    def allocate_pages(self, num_pages: int) -> None:
        num_free, num_needed = self.arena.num_free, self.arena.blocks_for(num_pages)
        assert num_needed <= -(-num_pages // PAGES_PER_BLOCK)
        if num_needed > num_free:
            return
        before = self.pages()
        self.num_adapters += 1
        owner = f"adapter {self.num_adapters}"
        self.parts[owner] = num_pages, self.arena.allocate_pages(owner, num_pages)
        assert self.arena.num_free == num_free - num_needed
        assert len(self.pages()) == len(before) + num_pages
        self.check_new(before)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([o for o, b in self.held.items() if b]))
        count = data.draw(st.integers(1, len(self.held[owner])))
        blocks, self.held[owner] = self.held[owner][:count], self.held[owner][count:]
        self.arena.free(owner, blocks)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def free_pages(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.parts)))
        num_pages, positions = self.parts.pop(owner)
        self.arena.free_pages(owner, positions, num_pages)

    @rule()
    def plan(self) -> None:
        self.planned += 1
        self.arena.planned(self.planned)
        self.readable[self.planned] = self.pages()

    @precondition(lambda self: self.retired < self.planned)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.retired = data.draw(st.integers(self.retired + 1, self.planned))
        self.arena.retire(self.retired)
        self.readable = {s: r for s, r in self.readable.items() if s > self.retired}

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.arena.check_integrity()
        owned = {page // PAGES_PER_BLOCK for page in self.pages()}
        assert self.arena.num_free + self.arena.num_retiring + len(owned) == NUM_BLOCKS
        held = {owner: set(blocks) for owner, blocks in self.held.items() if blocks}
        parts = {
            owner: {index // PAGES_PER_BLOCK for index in positions}
            for owner, (_, positions) in self.parts.items()
            if positions
        }
        assert self.arena.blocks_by_owner() == held | parts

    def teardown(self) -> None:
        """Nothing leaks: when all is freed, all blocks are whole again."""
        for owner, (num_pages, positions) in self.parts.items():
            self.arena.free_pages(owner, positions, num_pages)
        for owner, blocks in self.held.items():
            self.arena.free(owner, blocks)
        if self.retired < self.planned:
            self.arena.retire(self.planned)
        self.arena.check_integrity()
        assert self.arena.num_free == NUM_BLOCKS


ArenaMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestArena = ArenaMachine.TestCase


def test_freed_blocks_return_at_once_when_no_step_is_in_flight() -> None:
    arena = Arena(2)
    blocks = arena.allocate("a", 2)
    arena.free("a", blocks)
    assert arena.num_free == 2


def test_freed_blocks_return_only_after_the_last_step_that_had_them() -> None:
    arena = Arena(2)
    blocks = arena.allocate("a", 1)
    arena.planned(0)
    arena.planned(1)
    arena.free("a", blocks)
    arena.retire(0)
    assert (arena.num_free, arena.num_retiring) == (1, 1)
    arena.retire(1)
    assert (arena.num_free, arena.num_retiring) == (2, 0)


def test_freeing_what_another_owns_is_caught() -> None:
    arena = Arena(2)
    blocks = arena.allocate("a", 1)
    with pytest.raises(AssertionError, match="b frees block"):
        arena.free("b", blocks)


def test_adapters_fill_blocks_that_others_leave_partly_empty() -> None:
    """Five of 13 pages take 65 of the 96 pages of three blocks of 32."""
    arena = Arena(4, 32)
    for name in "abcde":
        assert arena.blocks_for(13) <= 1
        arena.allocate_pages(name, 13)
    assert (arena.num_free, arena.num_split) == (1, 3)


@pytest.mark.parametrize("num_pages", [3, 13, 26, 31])
def test_little_is_empty_after_adapters_have_come_and_gone(num_pages: int) -> None:
    """Pages of split blocks that nobody owns, of all pages of split blocks."""
    rng, arena = random.Random(num_pages), Arena(100, 32)
    held: dict[str, list[int]] = {}
    for number in range(2000):
        while arena.blocks_for(num_pages) > arena.num_free:
            victim = rng.choice(sorted(held))
            arena.free_pages(victim, held.pop(victim), num_pages)
        held[str(number)] = arena.allocate_pages(str(number), num_pages)
    assert len(held) * num_pages >= 0.97 * 100 * 32
