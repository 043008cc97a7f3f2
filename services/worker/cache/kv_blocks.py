"""How many blocks a sequence holds in each KV group. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.types.request import RELEASED_BLOCK, Request


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of the KV cache in blocks.

    A block holds `tokens_per_block` positions of all layers of one KV group. A group with a
    window needs only the blocks that the window can still see.
    """

    tokens_per_block: int
    windows: tuple[int | None, ...]
    """Per KV group: sliding window in tokens, or None."""
    max_step_tokens: int
    """The most positions of one sequence that a step computes."""

    @property
    def num_groups(self) -> int:
        """KV groups, full and windowed."""
        return len(self.windows)

    def ceil_blocks(self, num_tokens: int) -> int:
        """Blocks of one full group for the first `num_tokens` positions."""
        return -(-num_tokens // self.tokens_per_block)

    def window_cap(self, window: int) -> int:
        """The most blocks that a windowed group of one sequence ever holds."""
        return self.ceil_blocks(window - 1 + self.max_step_tokens) + 1

    def max_blocks(self, num_tokens: int) -> int:
        """The most blocks, over all groups, that a sequence of `num_tokens` ever holds."""
        whole = self.ceil_blocks(num_tokens)
        return sum(
            whole if window is None else min(whole, self.window_cap(window))
            for window in self.windows
        )

    def most_blocks(self, num_tokens: int, num_sequences: int) -> int:
        """Upper bound on the blocks of `num_sequences` sequences with `num_tokens` in total."""
        return self.num_groups * (num_tokens // self.tokens_per_block + num_sequences)

    def first_live_block(self, window: int | None, start: int) -> int:
        """Index of the first block that a query at position `start` or later can see."""
        if window is None:
            return 0
        return max(0, start - window + 1) // self.tokens_per_block

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks to add, over all groups, before positions [0, num_tokens) have a place."""
        wanted = self.ceil_blocks(num_tokens)
        held = sum(len(table) for table in request.block_tables)
        return wanted * self.num_groups - held


def kv_owner(request: Request) -> str:
    """Owner name of a sequence's blocks in the arena."""
    return f"request {request.request_id}"


def grow_tables(arena: Arena, layout: KvLayout, request: Request, num_tokens: int) -> None:
    """Give `request` blocks for positions [0, num_tokens). Mutates its block tables.

    The caller has made sure that `layout.missing_blocks` are free.
    """
    if not request.block_tables:
        request.block_tables = [[] for _ in layout.windows]
    wanted = layout.ceil_blocks(num_tokens)
    for table in request.block_tables:
        table.extend(arena.allocate(kv_owner(request), wanted - len(table)))


def release_behind_windows(layout: KvLayout, request: Request) -> list[int]:
    """Take out of the block tables what no query from `num_computed` on can see.

    Returns these blocks, for the caller to give back. Mutates the block tables.
    """
    released = []
    for window, table in zip(layout.windows, request.block_tables, strict=False):
        if window is None:
            continue
        index = layout.first_live_block(window, request.num_computed) - 1
        while index >= 0 and table[index] != RELEASED_BLOCK:
            released.append(table[index])
            table[index] = RELEASED_BLOCK
            index -= 1
    return released


def release_tables(request: Request) -> list[int]:
    """Empty the block tables. Returns their blocks, last positions first."""
    by_position = list(zip(*request.block_tables, strict=True))
    request.block_tables = []
    return [b for blocks in reversed(by_position) for b in blocks if b != RELEASED_BLOCK]
