"""Which adapters leave together so that a block becomes free."""

from pathlib import Path

from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.block_use import BlockUse
from loraplex_services.worker.types.residency import CachedAdapter


def idle_adapters(use: BlockUse, *pages: tuple[str, list[int]]) -> dict[str, CachedAdapter]:
    """Resident adapters with extents of one page each at these first pages."""
    found = {}
    for digest, first_pages in pages:
        adapter = CachedAdapter(digest, Path("/"), len(first_pages), 8, first_pages=first_pages)
        use.add(adapter)
        use.enter_idle(adapter)
        found[digest] = adapter
    return found


def test_the_block_that_the_fewest_evictions_free_is_chosen() -> None:
    use = BlockUse(Arena(2, pages_per_block=4))
    known = idle_adapters(use, ("x", [0, 4]), ("p", [1]), ("q", [2]), ("r", [5]))
    assert list(use.co_residents(known["x"], ())) == ["r"]
    assert list(use.co_residents(known["x"], ("r",))) == ["p", "q"]
    use.leave_idle(known["p"])
    assert list(use.co_residents(known["x"], ())) == ["r"]
    use.leave_idle(known["r"])
    assert list(use.co_residents(known["x"], ())) == []
