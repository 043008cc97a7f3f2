"""Accounts for the owner of every block of the device arena. Knows block ids only, never tensors.

KV cache and adapter weights share one free list. A block is in exactly one of four states:

    free  --allocate(owner)-->  owned  --free(owner)-->  retiring  --retire(step)-->  free
                                 owned  --transfer-->  owned by another
    free  --allocate_pages-->  split  --free_pages, retire-->  free

A freed block may still be read by steps that were planned while it was owned, so it becomes free
only when the last of them has finished, or immediately if no step is in flight. The same holds for
the extents of a split block (see `types.extents`), which is free when all of them are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from loraplex_services.common.nonzero_counter import NonzeroCounter
from loraplex_services.worker.types.extents import extent_sizes

Extent = tuple[int, int]
"""First page and number of pages."""


class Arena:
    """Block accounting with one free list, shared by requests and adapters."""

    def __init__(self, num_blocks: int, pages_per_block: int = 1) -> None:
        """`pages_per_block`: a power of two."""
        assert num_blocks > 0, f"an arena of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.pages_per_block = pages_per_block
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners: dict[int, str] = {}
        self._retiring: deque[tuple[int, list[int], list[Extent]]] = deque()
        self.last_planned = -1
        """The last step that was given blocks; -1 = there was none."""
        self._last_retired = -1
        self._extents: dict[int, tuple[int, str]] = {}
        """Pages and owner of each owned extent of a split block, by its first page."""
        self._free_extents: dict[int, set[int]] = {
            1 << bit: set() for bit in range(pages_per_block.bit_length() - 1)
        }
        """First pages of the free extents of split blocks, by size."""
        self._used: NonzeroCounter[int] = NonzeroCounter()
        """Owned extents of each split block that has any."""
        self._unused: set[int] = set()
        """Split blocks that become free when steps in flight have finished."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        """Blocks freed, but still readable by a step in flight."""
        return sum(len(blocks) for _, blocks, _ in self._retiring) + len(self._unused)

    @property
    def num_split(self) -> int:
        """Split blocks of which a part is owned."""
        return len(self._used)

    @property
    def num_loose(self) -> int:
        """Free pages of split blocks."""
        return sum(size * len(first) for size, first in self._free_extents.items())

    def allocate(self, owner: str, count: int) -> list[int]:
        """Give `count` blocks to `owner`, in ascending order, so that adjacent ones can be copied
        together. The caller has made sure that they are free."""
        assert 0 <= count <= len(self._free), f"{owner} wants {count} of {len(self._free)} blocks"
        blocks = sorted(self._free.pop() for _ in range(count))
        for block in blocks:
            self._owners[block] = owner
        return blocks

    def blocks_for(self, num_pages: int) -> int:
        """Free blocks that `allocate_pages` would take now."""
        whole, rest = divmod(num_pages, self.pages_per_block)
        counts = {size: len(first_pages) for size, first_pages in self._free_extents.items()}
        for wanted in extent_sizes(rest, self.pages_per_block):
            size = wanted
            while not counts.get(size):
                size *= 2
                if size >= self.pages_per_block:
                    return whole + 1
            counts[size] -= 1
            while size > wanted:
                size //= 2
                counts[size] += 1
        return whole

    def allocate_pages(self, owner: str, num_pages: int) -> list[int]:
        """Give extents of `num_pages` in all to `owner`: whole blocks, then parts of split blocks,
        and of a newly split block where these have too few free pages. The caller has made sure
        that `blocks_for` are free. Returns their first pages."""
        whole, rest = divmod(num_pages, self.pages_per_block)
        blocks = self.allocate(owner, whole)
        first_pages = [block * self.pages_per_block for block in blocks]
        return first_pages + [
            self._allocate_extent(owner, size) for size in extent_sizes(rest, self.pages_per_block)
        ]

    def free(self, owner: str, blocks: Sequence[int], last_used: int | None = None) -> None:
        """Take `blocks` back from `owner`; they become free once no step in flight has them.

        Args:
            last_used: the last step that was given them; None = the last one planned.
        """
        self._give_back(owner, blocks, [], last_used)

    def free_pages(
        self, owner: str, first_pages: Sequence[int], num_pages: int, last_used: int | None = None
    ) -> None:
        """Take what `allocate_pages` gave back from `owner`, as `free` does."""
        num_whole = num_pages // self.pages_per_block
        blocks = [first_page // self.pages_per_block for first_page in first_pages[:num_whole]]
        self._give_back(owner, blocks, first_pages[num_whole:], last_used)

    def transfer(self, owner: str, new_owner: str, blocks: Sequence[int]) -> None:
        """Give `blocks` to another owner. Their content and the steps that read them are not
        affected."""
        for block in blocks:
            holder = self._owners.get(block)
            assert holder == owner, f"{owner} passes on block {block} of {holder}"
            self._owners[block] = new_owner

    def planned(self, step: int) -> None:
        """Note that `step` was given the blocks that are owned now."""
        assert step > self.last_planned, f"step {step} after {self.last_planned}"
        self.last_planned = step

    def retire(self, step: int) -> None:
        """Note that `step` and all before it have finished on the device."""
        assert self._last_retired < step <= self.last_planned, (
            f"retire {step}: planned {self.last_planned}, retired {self._last_retired}"
        )
        self._last_retired = step
        while self._retiring and self._retiring[0][0] <= step:
            _, blocks, extents = self._retiring.popleft()
            self._free.extend(blocks)
            for extent in extents:
                self._merge(*extent)

    def _give_back(
        self, owner: str, blocks: Sequence[int], first_pages: Sequence[int], last_used: int | None
    ) -> None:
        for block in blocks:
            holder = self._owners.pop(block, None)
            assert holder == owner, f"{owner} frees block {block} of {holder}"
        extents = [self._release(owner, first_page) for first_page in first_pages]
        last_used = self.last_planned if last_used is None else last_used
        if last_used > self._last_retired:
            # Filed under the last planned step, which may be a later one, to keep the queue in
            # order.
            self._retiring.append((self.last_planned, list(blocks), extents))
        else:
            self._free.extend(blocks)
            for extent in extents:
                self._merge(*extent)

    def _allocate_extent(self, owner: str, wanted: int) -> int:
        """An extent of `wanted` pages, halving a larger one where none is free."""
        size = wanted
        while size < self.pages_per_block and not self._free_extents[size]:
            size *= 2
        if size == self.pages_per_block:
            first_page = self._free.pop() * size
        else:
            # The lowest address is taken, so that the upper blocks become free.
            first_page = min(self._free_extents[size])
            self._free_extents[size].remove(first_page)
        while size > wanted:
            size //= 2
            self._free_extents[size].add(first_page + size)
        self._extents[first_page] = size, owner
        block = first_page // self.pages_per_block
        self._used[block] += 1
        self._unused.discard(block)
        return first_page

    def _release(self, owner: str, first_page: int) -> Extent:
        """Take an extent from `owner`. Steps in flight may still read it."""
        size, holder = self._extents.pop(first_page, (0, None))
        assert holder == owner, f"{owner} frees page {first_page} of {holder}"
        block = first_page // self.pages_per_block
        self._used.remove(block)
        if block not in self._used:
            self._unused.add(block)
        return first_page, size

    def _merge(self, first_page: int, size: int) -> None:
        """Free an extent, merging it with its buddy as long as that is free too."""
        while size < self.pages_per_block and first_page ^ size in self._free_extents[size]:
            self._free_extents[size].remove(first_page ^ size)
            first_page, size = min(first_page, first_page ^ size), 2 * size
        if size < self.pages_per_block:
            self._free_extents[size].add(first_page)
        else:
            self._unused.remove(first_page // size)
            self._free.append(first_page // size)

    def blocks_by_owner(self) -> dict[str, set[int]]:
        """The blocks of each owner, and its parts of split blocks. Walks all blocks: for tests and
        integrity checks."""
        owned: dict[str, set[int]] = {}
        for block, owner in self._owners.items():
            owned.setdefault(owner, set()).add(block)
        for first_page, (_, owner) in self._extents.items():
            owned.setdefault(owner, set()).add(first_page // self.pages_per_block)
        return owned

    def check_integrity(self) -> None:
        """Assert that every page has exactly one owner or is free once."""
        free = [(p, size) for size, first_pages in self._free_extents.items() for p in first_pages]
        retiring = [extent for _, _, extents in self._retiring for extent in extents]
        parts = [*free, *retiring, *((p, size) for p, (size, _) in self._extents.items())]
        pages = [
            page for first_page, size in parts for page in range(first_page, first_page + size)
        ]
        blocks = [*self._free, *self._owners, *(b for _, some, _ in self._retiring for b in some)]
        per_block = self.pages_per_block
        pages += [p for b in blocks for p in range(b * per_block, (b + 1) * per_block)]
        assert len(pages) == self.num_blocks * per_block, f"{len(pages)} pages accounted for"
        assert set(pages) == set(range(len(pages))), "a page is listed twice"
        split = {first_page // per_block for first_page, _ in parts}
        assert split == {*self._used, *self._unused} and not self._unused & {*self._used}
        used = Counter(first_page // per_block for first_page in self._extents)
        assert used == self._used, f"{used} != {self._used}"
        steps = [step for step, _, _ in self._retiring]
        assert steps == sorted(steps), f"retiring out of order: {steps}"
