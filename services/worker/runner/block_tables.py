"""The block tables of running requests, which are kept on the device between steps.

A request keeps one row for as long as it runs, whatever its position in the batch is, and a step
copies only the entries that are new or have changed. What a step costs here does not depend on the
length of the contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter, is_
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex_services.worker.runner.step_inputs import Int64s
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import PlannedRow

Tables: TypeAlias = list[list[int]]
"""The blocks of a request by KV group."""
_START, _IS_CONTEXT = attrgetter("start"), attrgetter("is_context")
ALIGNED_ENTRIES = 4
"""Entries of 16 bytes, which Triton expects of the start of any tensor."""


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
        self._held: dict[Request, int] = {}
        """The row of each request."""
        self._tables_of: dict[int, Tables] = {}
        """The tables of the request of each row. A different list means that the request has
        started again."""
        self._free = list(range(max_rows - 1, -1, -1))
        self._first_open = np.full(max_rows, -1, dtype=np.int64)
        """For each row, blocks before this one cannot change any more; -1 = nothing is written."""
        self._num_blocks = [0] * max_rows
        """For each row, the number of entries in each KV group."""
        self._last_tables: list[Tables] = []
        self._last_rows: Int64s = np.zeros(0, dtype=np.int64)
        """The tables of the step before, and their rows."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of a request for whose blocks there is space."""
        return self.device.shape[-1] * self._tokens_per_block

    def hold(self, rows: Sequence[PlannedRow]) -> bool:
        """Whether there is space for the blocks of all requests of these rows."""
        return all(len(row.request.block_tables[0]) <= self.device.shape[-1] for row in rows)

    def update(self, rows: Sequence[PlannedRow]) -> TableChanges:
        """Give each planned row its table row, and find the entries that have changed. The tables
        `hold` the rows. Nothing need have been written for earlier steps.

        An entry changes when a request gets more blocks, or when the prefix cache replaces a block
        that the request has completed by an equal one. Both can only happen from the block on that
        the previous step began to write, so earlier entries are not compared. A request that
        decodes gets a block when it begins to write it.
        """
        tables = [row[0].block_tables for row in rows]
        is_same = len(tables) == len(self._last_tables)
        if not (is_same and all(map(is_, tables, self._last_tables))):
            table_rows = [self._row_of(row[0], rows) for row in rows]
            self._last_tables, self._last_rows = tables, np.array(table_rows, dtype=np.int64)
        starts = np.fromiter(map(_START, rows), np.int64, len(rows))
        first_open = starts // self._tokens_per_block
        changed = self._first_open[self._last_rows] != first_open
        for index, _ in enumerate(takewhile(_IS_CONTEXT, rows)):
            held = self._num_blocks[self._last_rows[index]]
            changed[index] |= len(tables[index][0]) != held
        indices: list[int] = []
        blocks: list[int] = []
        for index in np.flatnonzero(changed).tolist():
            table_row = int(self._last_rows[index])
            self._write(table_row, tables[index], indices, blocks)
            self._first_open[table_row] = first_open[index]
            self._num_blocks[table_row] = len(tables[index][0])
        return TableChanges(
            self._last_rows,
            np.array(indices, dtype=np.int64),
            np.array(blocks, dtype=np.int32),
        )

    def kv_slots(self, group: int, table_rows: Int64s, positions: Int64s) -> Int64s:
        """`[T]`: block * tokens per block + slot in the block, of positions `[T]` in rows `[T]`."""
        size = self._tokens_per_block
        block, slot = np.divmod(positions, size)
        kv_slots: Int64s = self._host[group, table_rows, block].astype(np.int64) * size + slot
        return kv_slots

    def _row_of(self, request: Request, rows: Sequence[PlannedRow]) -> int:
        """The row of a request of the step. If the request is new or its tables were started again,
        no entry counts as written."""
        row = self._held.get(request)
        if row is not None and self._tables_of[row] is request.block_tables:
            return row
        if row is None:
            if not self._free:
                self._release_absent(rows)
            row = self._held[request] = self._free.pop()
        self._tables_of[row] = request.block_tables
        self._first_open[row] = -1
        return row

    def _release_absent(self, rows: Sequence[PlannedRow]) -> None:
        """Take their rows from all requests that are not in the step.

        Steps in flight have read these rows, or will have, before this step writes to them: tables
        change in the order of the device's stream.
        """
        present = {planned.request for planned in rows}
        for request in [request for request in self._held if request not in present]:
            self._free.append(self._held.pop(request))

    def _write(self, row: int, tables: Tables, indices: list[int], blocks: list[int]) -> None:
        """Note the entries from the first that may have changed. Mutates: indices, blocks."""
        _, max_rows, max_blocks = self._host.shape
        begin = max(0, int(self._first_open[row]))
        for group, table in enumerate(tables):
            assert len(table) <= max_blocks, (len(table), max_blocks)
            changed = table[begin:]
            self._host[group, row, begin : len(table)] = changed
            first = (group * max_rows + row) * max_blocks + begin
            indices += range(first, first + len(changed))
            blocks += changed
