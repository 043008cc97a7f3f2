"""The arena's accounting under every order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex_services.worker.cache.arena import Arena

NUM_BLOCKS = 12


class ArenaMachine(RuleBasedStateMachine):
    """Allocates, frees, plans and retires against a plain model of who may hold what."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NUM_BLOCKS)
        self.held: dict[str, list[int]] = {}
        self.planned = -1
        self.retired = -1
        self.readable: dict[int, set[int]] = {}
        """Blocks owned when each step in flight was planned."""

    @rule(owner=st.sampled_from("abcd"), count=st.integers(0, 5))
    def allocate(self, owner: str, count: int) -> None:
        count = min(count, self.arena.num_free)
        blocks = self.arena.allocate(owner, count)
        for step, readable in self.readable.items():
            assert not readable & set(blocks), f"step {step} still reads {blocks}"
        self.held.setdefault(owner, []).extend(blocks)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([o for o, b in self.held.items() if b]))
        count = data.draw(st.integers(1, len(self.held[owner])))
        blocks, self.held[owner] = self.held[owner][:count], self.held[owner][count:]
        self.arena.free(owner, blocks)

    @rule()
    def plan(self) -> None:
        self.planned += 1
        self.arena.planned(self.planned)
        self.readable[self.planned] = {b for blocks in self.held.values() for b in blocks}

    @precondition(lambda self: self.retired < self.planned)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.retired = data.draw(st.integers(self.retired + 1, self.planned))
        self.arena.retire(self.retired)
        self.readable = {s: r for s, r in self.readable.items() if s > self.retired}

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.arena.check_integrity()
        num_held = sum(len(blocks) for blocks in self.held.values())
        assert self.arena.num_free + self.arena.num_retiring + num_held == NUM_BLOCKS
        held = {owner: set(blocks) for owner, blocks in self.held.items() if blocks}
        assert self.arena.blocks_by_owner() == held


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
