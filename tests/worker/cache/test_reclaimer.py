"""What goes first when blocks are wanted."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.reclaimer import Offer, Reclaimer, reuse_probability


class Shelf:
    """Idle items that go in the order given."""

    def __init__(self, arena: Arena, name: str, offers: list[Offer]) -> None:
        self.arena, self.name = arena, name
        self.items = [(offer, arena.allocate(name, offer.num_blocks)) for offer in offers]
        self.gone: list[Offer] = []

    def idle_blocks(self, protected: Collection[str]) -> int:
        return 0 if self.name in protected else sum(o.num_blocks for o, _ in self.items)

    def offer(self, protected: Collection[str], now: float) -> Offer | None:
        return None if self.name in protected or not self.items else self.items[0][0]

    def give_up(self, protected: Collection[str], whole_block: bool) -> None:
        offer, blocks = self.items.pop(0)
        self.arena.free(self.name, blocks)
        self.gone.append(offer)


def make_stage(num_blocks: int, *shelves: list[Offer]) -> tuple[Arena, Reclaimer, list[Shelf]]:
    arena = Arena(num_blocks)
    reclaimer = Reclaimer(arena)
    made = [Shelf(arena, f"s{index}", offers) for index, offers in enumerate(shelves)]
    for shelf in made:
        reclaimer.add(shelf)
    return arena, reclaimer, made


def test_the_least_loss_per_block_goes_first() -> None:
    dear, cheap = Offer(2, 4.0, 0.5), Offer(4, 4.0, 0.5)
    _, reclaimer, shelves = make_stage(6, [dear], [cheap])
    assert reclaimer.reclaim(3, now=0.0)
    assert [shelf.gone for shelf in shelves] == [[], [cheap]]


def test_long_idle_things_are_cheap() -> None:
    assert reuse_probability(0.0) == 1.0
    assert reuse_probability(10.0) < reuse_probability(1.0)


def test_protected_items_stay_and_a_refusal_frees_nothing() -> None:
    arena, reclaimer, shelves = make_stage(6, [Offer(3, 1.0, 1.0)], [Offer(3, 9.0, 1.0)])
    assert not reclaimer.reclaim_pages(4, now=0.0, protected=["s0"])
    assert arena.num_free == 0 and not shelves[1].gone
    assert reclaimer.reclaim_pages(3, now=0.0, protected=["s0"])
    assert shelves[1].gone and not shelves[0].gone


OFFERS = st.lists(st.builds(Offer, st.integers(1, 4), st.floats(0, 9), st.floats(0, 1)), max_size=5)


@given(st.lists(OFFERS, min_size=1, max_size=3), st.integers(1, 60))
def test_what_is_asked_for_is_freed_if_it_can_be_and_no_item_more(
    shelves: list[list[Offer]], wanted: int
) -> None:
    total = sum(o.num_blocks for offers in shelves for o in offers)
    arena, reclaimer, made = make_stage(total + 3, *shelves)
    assert reclaimer.reclaim(wanted, now=0.0) == (wanted <= total + 3)
    gone = [offer for shelf in made for offer in shelf.gone]
    if wanted > total + 3:
        assert not gone
    elif gone:
        assert arena.num_free - max(o.num_blocks for o in gone) < wanted <= arena.num_free
