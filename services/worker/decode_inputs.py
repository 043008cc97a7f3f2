"""What a pure-decode step reads, at fixed addresses, for graphs to be captured over."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import torch

from services.worker.attention.backend import AttentionKernels, StaticInputs
from services.worker.kernels.lora.runs import RowRun, disjoint_passes
from services.worker.kernels.lora.step_work import StepWork
from services.worker.kernels.lora.triton import DeviceLora
from services.worker.kernels.lora.tuned import tuned_plan
from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.layers.ropes import Ropes
from services.worker.memory.buffer import KvBuffer
from services.worker.model.batch import ForwardBatch
from services.worker.request import StepPlan
from services.worker.transfers import copy_into

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def batch_size_for(num_rows: int) -> int | None:
    """The smallest captured batch that holds so many rows."""
    return next((size for size in BATCH_SIZES if size >= num_rows), None)


class BlockTables:
    """Block tables at fixed addresses; only rows that changed are written again."""

    def __init__(self, num_groups: int, max_rows: int, max_blocks: int, device: torch.device):
        shape = num_groups, max_rows, max_blocks
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host = torch.zeros(shape, dtype=torch.int32)
        self._known: dict[tuple[int, int], list[int]] = {}

    def fill(self, rows: Sequence[Sequence[Sequence[int]]]) -> None:
        """Copy each row's tables, one of each KV group."""
        width, changed = 0, False
        for i, tables in enumerate(rows):
            for group, table in enumerate(tables):
                if self._known.get((group, i)) == table:
                    continue
                self._known[group, i] = list(table)
                self._host[group, i, : len(table)] = torch.tensor(table, dtype=torch.int32)
                changed = True
            width = max(width, *map(len, tables))
        if changed:
            copy_into(self.device[:, : len(rows), :width], self._host[:, : len(rows), :width])


class DecodeInputs:
    """Static inputs of pure-decode steps, and the batches that read them."""

    def __init__(
        self,
        kv: KvBuffer,
        lora: DeviceLora,
        ropes: Ropes,
        max_model_len: int,
        itemsize: int,
        attention: AttentionKernels,
        eager_sites: Set[int] = frozenset(),
    ) -> None:
        """`eager_sites`: those that no graph holds, so that adapters may do anything there."""
        device, rows = lora.tables.arena.device, BATCH_SIZES[-1]
        self._kv = kv
        self._lora = lora
        self._ropes = ropes
        self._itemsize = itemsize
        self._max_model_len = max_model_len
        self._attention = attention
        self._eager_sites = eager_sites
        num_groups = len(kv.windows)
        self._numbers = torch.zeros(3 + num_groups, rows, dtype=torch.int64, device=device)
        self.input_ids, self.positions, self.rope_rows = self._numbers[:3]
        self.places = self._numbers[3:]
        self.table_rows = torch.arange(rows, dtype=torch.int32, device=device)
        max_blocks = -(-max_model_len // kv.tokens_per_block)
        self.tables = BlockTables(num_groups, rows, max_blocks, device)
        self._works: dict[int, StepWork] = {}

    def accepts(self, plan: StepPlan, runs: Sequence[RowRun]) -> bool:
        """Whether a graph can compute the step."""
        return (
            plan.num_contexts == 0
            and 0 < len(plan.rows) <= BATCH_SIZES[-1]
            and all(row.num_tokens == 1 for row in plan.rows)
            and all(row.start < self._max_model_len for row in plan.rows)
            and len(disjoint_passes(runs)) <= 1
            and all(self._lora.tables.in_torch(r.slot) <= self._eager_sites for r in runs)
        )

    def touched_sites(self, runs: Sequence[RowRun]) -> frozenset[int]:
        """Sites of a graph where adapters of the step have something to add."""
        return self._lora.sites_of(runs) - self._eager_sites

    def fill(self, plan: StepPlan, runs: Sequence[RowRun], size: int) -> None:
        """Copy a step to the device; rows after its last become padding up to `size`."""
        rows = plan.rows
        starts = [row.start for row in rows]
        tables = [row.request.block_tables for row in rows]
        num_groups = len(self._kv.windows)
        places = (
            [self._place(groups[g], start) for groups, start in zip(tables, starts, strict=True)]
            for g in range(num_groups)
        )
        ropes = [self._ropes.row(row.slots, row.request.is_long) for row in rows]
        numbers = torch.zeros(3 + num_groups, BATCH_SIZES[-1], dtype=torch.int64)
        numbers[0, : len(rows)] = torch.tensor([row.input_ids()[0] for row in rows])
        numbers[1, : len(rows)] = torch.tensor(starts)
        numbers[2, : len(rows)] = torch.tensor(ropes)
        numbers[3:] = -1
        for group, group_places in enumerate(places):
            numbers[3 + group, : len(rows)] = torch.tensor(group_places)
        copy_into(self._numbers, numbers)
        self.tables.fill(tables)
        if runs:
            self.work(size).fill(runs)

    def work(self, size: int) -> StepWork:
        """The adapters' work of a batch size; runs may be of any length and any rank."""
        if size not in self._works:
            ranks = self._lora.planes.max_ranks
            plan = tuned_plan(1, size, self._itemsize, self._lora.tables.arena.device)
            plan = self._lora.fit(plan, size, ranks)
            self._works[size] = StepWork(self._lora.tables, size, plan, ranks)
        return self._works[size]

    def batch(self, size: int, sites: frozenset[int], table: LoraBatch) -> ForwardBatch:
        """The batch that a graph of `size` rows reads.

        Args:
            sites: where adapters may add something; none = the base alone.
            table: names the adapters' tables.
        """
        works = (self.work(size),) if sites else ()
        attention = StaticInputs(
            cache=self._kv,
            positions=self.positions[:size],
            places=tuple(places[:size] for places in self.places),
            tables=tuple(self.tables.device),
            table_rows=self.table_rows[:size],
            max_keys=self._max_model_len,
        )
        return ForwardBatch(
            input_ids=self.input_ids[:size],
            positions=self.positions[:size],
            attention=self._attention.static_metadata(attention),
            lora=replace(table, runs=(), works=works, sites=sites),
            rope_rows=self.rope_rows[:size],
        )

    def _place(self, table: Sequence[int], position: int) -> int:
        num_slots = self._kv.tokens_per_block
        return table[position // num_slots] * num_slots + position % num_slots
