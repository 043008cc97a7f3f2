"""Accounts for the owner of every block of the device arena. Knows block ids only, never tensors.

KV cache and adapter weights share one free list. A block is in exactly one of three states:

    free  --allocate(owner)-->  owned  --free(owner)-->  retiring  --retire(step)-->  free
                                 owned  --transfer-->  owned by another

A freed block may still be read by steps that were planned while it was owned, so it becomes free
only when the last of them has finished, or immediately if no step is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Arena:
    """Block accounting with one free list, shared by requests and adapters."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"an arena of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners: dict[int, str] = {}
        self._retiring: deque[tuple[int, list[int]]] = deque()
        self._last_planned = -1
        self._last_retired = -1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        """Blocks freed, but still readable by a step in flight."""
        return sum(len(blocks) for _, blocks in self._retiring)

    @property
    def last_planned(self) -> int:
        """The last step that was given blocks; -1 = none was."""
        return self._last_planned

    def allocate(self, owner: str, count: int) -> list[int]:
        """Give `count` blocks to `owner`, ascending, so that neighbours are copied at once. The
        caller has made sure that they are free."""
        assert 0 <= count <= len(self._free), f"{owner} wants {count} of {len(self._free)} blocks"
        blocks = sorted(self._free.pop() for _ in range(count))
        for block in blocks:
            self._owners[block] = owner
        return blocks

    def free(self, owner: str, blocks: Sequence[int], last_used: int | None = None) -> None:
        """Take `blocks` back from `owner`; they become free once no step in flight has them.

        Args:
            last_used: the last step that was given them; None = the last one planned.
        """
        for block in blocks:
            holder = self._owners.pop(block, None)
            assert holder == owner, f"{owner} frees block {block} of {holder}"
        last_used = self._last_planned if last_used is None else last_used
        if last_used > self._last_retired:
            # Filed under the last step planned, perhaps a later one, to keep the queue in order.
            self._retiring.append((self._last_planned, list(blocks)))
        else:
            self._free.extend(blocks)

    def transfer(self, owner: str, new_owner: str, blocks: Sequence[int]) -> None:
        """Pass `blocks` on; their content and the steps that read them are not touched."""
        for block in blocks:
            holder = self._owners.get(block)
            assert holder == owner, f"{owner} passes on block {block} of {holder}"
            self._owners[block] = new_owner

    def planned(self, step: int) -> None:
        """Note that `step` was given the blocks owned now."""
        assert step > self._last_planned, f"step {step} after {self._last_planned}"
        self._last_planned = step

    def retire(self, step: int) -> None:
        """Note that `step` and all before it have finished on the device."""
        assert self._last_retired < step <= self._last_planned, (
            f"retire {step}: planned {self._last_planned}, retired {self._last_retired}"
        )
        self._last_retired = step
        while self._retiring and self._retiring[0][0] <= step:
            self._free.extend(self._retiring.popleft()[1])

    def blocks_by_owner(self) -> dict[str, set[int]]:
        """Who owns what. Walks all blocks: for tests and integrity checks."""
        owned: dict[str, set[int]] = {}
        for block, owner in self._owners.items():
            owned.setdefault(owner, set()).add(block)
        return owned

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place."""
        retiring = [block for _, blocks in self._retiring for block in blocks]
        everywhere = [*self._free, *self._owners, *retiring]
        assert len(everywhere) == self.num_blocks, (
            f"{len(everywhere)} blocks accounted for, not {self.num_blocks}"
        )
        assert set(everywhere) == set(range(self.num_blocks)), "a block is in two places"
        steps = [step for step, _ in self._retiring]
        assert steps == sorted(steps), f"retiring out of order: {steps}"
