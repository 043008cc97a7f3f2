"""The block tables of running requests, which are kept on the device between steps.

A request keeps one row for as long as it runs, whatever its position in the batch is, and a step
copies only the entries that are new or have changed. What a step costs here does not depend on the
length of the contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex_services.worker.runner.step_inputs import Int64s
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow

ALIGNED_ENTRIES = 4
"""Entries of 16 bytes, which Triton expects of the start of any tensor."""


@dataclass(slots=True)
class TableRow:
    """The entries of one request in the tables."""

    row: int
    tables: list[list[int]]
    """The request's block tables. A different list means that the request has started again."""
    first_open: int = 0
    """Blocks before this one cannot change any more."""
    num_blocks: int = 0
    """Number of entries in each KV group."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Entries that a step has to write, and the rows that it reads."""

    rows: Int64s
    """`[n]`: the table row of each planned row."""
    indices: Int64s
    """`[u]`: positions of the entries in the flat tables."""
    blocks: NDArray[np.int32]
    """`[u]`: new values of the entries."""


class BlockTables:
    """Block tables at fixed addresses, with a copy on the host."""

    def __init__(
        self,
        num_groups: int,
        max_rows: int,
        max_blocks: int,
        tokens_per_block: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            max_rows: the most requests in one step.
            max_blocks: the most blocks of one request in a KV group.
        """
        # The tables of all groups are aligned alike: kernels are compiled for what they are given.
        shape = num_groups, max_rows, -(-max_blocks // ALIGNED_ENTRIES) * ALIGNED_ENTRIES
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        """int32 `[KV groups, rows, blocks]`. Entries that no query of a step sees are void."""
        self._host = np.zeros(shape, dtype=np.int32)
        self._tokens_per_block = tokens_per_block
        self._held: dict[Request, TableRow] = {}
        self._free = list(range(max_rows - 1, -1, -1))

    def update(self, rows: Sequence[PlannedRow]) -> TableChanges:
        """Give each planned row its table row, and find the entries that have changed.

        An entry changes when a request gets more blocks, or when the prefix cache replaces a block
        that the request has completed by an equal one. Both concern blocks from the one that the
        step before began to write, so entries before that one are not looked at.
        """
        size, get = self._tokens_per_block, self._held.get
        table_rows: list[int] = []
        indices: list[int] = []
        blocks: list[int] = []
        for planned in rows:
            request, start = planned[0], planned[1]
            tables = request.block_tables
            held = get(request)
            if held is None or held.tables is not tables:
                held = self._enter(request, rows)
            num_blocks, block = len(tables[0]), start // size
            if num_blocks != held.num_blocks or block != held.first_open:
                self._write(held, indices, blocks)
                held.first_open, held.num_blocks = block, num_blocks
            table_rows.append(held.row)
        return TableChanges(
            np.array(table_rows, dtype=np.int64),
            np.array(indices, dtype=np.int64),
            np.array(blocks, dtype=np.int32),
        )

    def kv_slots(self, group: int, table_rows: Int64s, positions: Int64s) -> Int64s:
        """`[T]`: block * tokens per block + slot in the block, of positions `[T]` in rows `[T]`."""
        size = self._tokens_per_block
        block, slot = np.divmod(positions, size)
        kv_slots: Int64s = self._host[group, table_rows, block].astype(np.int64) * size + slot
        return kv_slots

    def _enter(self, request: Request, rows: Sequence[PlannedRow]) -> TableRow:
        """Give a row to a request that has none, or whose tables were started again."""
        held = self._held.get(request)
        if held is None:
            if not self._free:
                self._release_absent(rows)
            held = TableRow(self._free.pop(), request.block_tables)
        held.tables, held.first_open, held.num_blocks = request.block_tables, 0, 0
        self._held[request] = held
        return held

    def _release_absent(self, rows: Sequence[PlannedRow]) -> None:
        """Take their rows from all requests that are not in the step.

        Steps in flight have read these rows, or will have, before this step writes to them: tables
        change in the order of the device's stream.
        """
        present = {planned.request for planned in rows}
        for request in [request for request in self._held if request not in present]:
            self._free.append(self._held.pop(request).row)

    def _write(self, held: TableRow, indices: list[int], blocks: list[int]) -> None:
        """Note the entries from the first that may have changed. Mutates: indices, blocks."""
        _, max_rows, max_blocks = self._host.shape
        begin = held.first_open
        for group, table in enumerate(held.tables):
            assert len(table) <= max_blocks, (len(table), max_blocks)
            changed = table[begin:]
            self._host[group, held.row, begin : len(table)] = changed
            first = (group * max_rows + held.row) * max_blocks + begin
            indices += range(first, first + len(changed))
            blocks += changed
