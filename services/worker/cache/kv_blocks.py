"""Computes how many blocks a sequence holds in each KV group. Pure arithmetic."""

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
    """Most positions of one sequence that a step computes."""
    state_blocks: int = 0
    """Number of blocks for the recurrent state of a running sequence, whatever its length."""

    @property
    def num_groups(self) -> int:
        """KV groups, full and windowed."""
        return len(self.windows)

    def ceil_blocks(self, num_tokens: int) -> int:
        """Blocks of one full group for the first `num_tokens` positions."""
        return -(-num_tokens // self.tokens_per_block)

    def window_cap(self, window: int) -> int:
        """Most blocks that a windowed group of one sequence ever holds."""
        return self.ceil_blocks(window - 1 + self.max_step_tokens) + 1

    def max_blocks(self, num_tokens: int) -> int:
        """Most blocks, over all groups, that a sequence of `num_tokens` ever holds."""
        whole = self.ceil_blocks(num_tokens)
        return self.state_blocks + sum(
            whole if window is None else min(whole, self.window_cap(window))
            for window in self.windows
        )

    def most_blocks(self, num_tokens: int, num_sequences: int) -> int:
        """Upper bound on the blocks of `num_sequences` sequences with `num_tokens` in total."""
        whole = self.num_groups * (num_tokens // self.tokens_per_block + num_sequences)
        return whole + num_sequences * self.state_blocks

    def first_live_block(self, window: int | None, start: int) -> int:
        """Index of the first block that a query at position `start` or later can see."""
        if window is None:
            return 0
        return max(0, start - window + 1) // self.tokens_per_block

    def missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Number of blocks, over all groups, that must be added to hold positions [0, num_tokens)
        and the state."""
        if request.without_cache:
            return 0
        wanted = self.ceil_blocks(num_tokens) * self.num_groups + self.state_blocks
        held = sum(len(table) for table in request.block_tables) + len(request.state_blocks)
        return wanted - held


def kv_owner(request: Request) -> str:
    """Owner name of a sequence's blocks in the arena."""
    return f"request {request.request_id}"


def grow_tables(arena: Arena, layout: KvLayout, request: Request, num_tokens: int) -> None:
    """Give `request` blocks for positions [0, num_tokens) and for its state. Mutates its tables.

    The caller has made sure that `layout.missing_blocks` are free.
    """
    if not request.block_tables:
        request.block_tables = [[] for _ in layout.windows]
    wanted = layout.ceil_blocks(num_tokens)
    for table in request.block_tables:
        table.extend(arena.allocate(kv_owner(request), wanted - len(table)))
    if len(request.state_blocks) < layout.state_blocks:
        request.state_blocks = arena.allocate(kv_owner(request), layout.state_blocks)


def release_behind_windows(layout: KvLayout, request: Request) -> list[int]:
    """Remove the blocks that no query from `num_computed` on can see from the block tables. Returns
    these blocks, for the caller to give back. Mutates the block tables."""
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
    """Empty the tables. Returns their blocks: the states', then the last positions first."""
    by_position = list(zip(*request.block_tables, strict=True))
    states = [b for blocks in (request.state_blocks, *request.draft_states) for b in blocks]
    request.block_tables, request.state_blocks, request.draft_states = [], [], []
    return states + [b for blocks in reversed(by_position) for b in blocks if b != RELEASED_BLOCK]
