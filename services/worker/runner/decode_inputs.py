"""The inputs of a decode step at fixed addresses, over which graphs are captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.cache.state_layout import StateLayout
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.metadata import StaticInputs
from loraplex_services.worker.ops.lora.step_work import MIN_RUNS, static_work
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.recurrence.backend import StateBatch, blocks_of, state_cells
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.runner.input_buffer import InputBuffer
from loraplex_services.worker.runner.step_inputs import StepInputs
from loraplex_services.worker.transfers import copy_into
from loraplex_services.worker.types.step_plan import StateSpan

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def batch_size_for(num_rows: int) -> int | None:
    """The smallest captured batch that holds `num_rows` rows."""
    return next((size for size in BATCH_SIZES if size >= num_rows), None)


class DecodeInputs:
    """Implements `cuda_graphs.GraphInputs` for pure-decode steps."""

    sizes = BATCH_SIZES

    def __init__(
        self,
        kv: KvBuffer,
        lora: DeviceLora,
        tables: BlockTables,
        max_model_len: int,
        attention: AttentionMaker,
        states: StateLayout | None = None,
    ) -> None:
        """`states`: of the base's recurrent layers, if it has any."""
        self._kv = kv
        self._max_model_len = max_model_len
        self._attention = attention
        self.tables = tables
        self.buffer = InputBuffer(BATCH_SIZES[-1], BATCH_SIZES[-1], MIN_RUNS, tables)
        self._work = static_work(lora.tables, BATCH_SIZES[-1], self.buffer.runs)
        self._states = None if states is None else DecodeStates(kv.arena.data, states)

    def clear(self) -> None:
        """Fill with padding."""
        self.buffer.clear()
        if self._states is not None:
            self._states.fill(())

    def size_for(self, step: StepInputs) -> int | None:
        """See `GraphInputs`. None if the step computes prompts as well."""
        return batch_size_for(step.num_rows) if step.is_decode else None

    def fill(self, step: StepInputs, batch: ForwardBatch) -> None:
        """Copy a step to the device, to be computed by `batch`."""
        self.buffer.fill(step, step.runs)
        if self._states is not None:
            self._states.fill(step.plan.states)

    def batch(self, size: int, sites: frozenset[int], table: LoraBatch) -> ForwardBatch:
        """See `GraphInputs`."""
        work = self._work if sites else None
        buffer, positions = self.buffer, self.buffer.positions[:size]
        attention = StaticInputs(
            kv_slots=tuple(kv_slots[:size] for kv_slots in buffer.kv_slots),
            tables=tuple(self.tables.device),
            table_rows=buffer.decode_rows[:size],
            max_keys=self._max_model_len,
        )
        return ForwardBatch(
            input_ids=buffer.input_ids[:size],
            positions=positions,
            attention=self._attention.graph_metadata(self._kv, positions, attention),
            lora=replace(table, runs=(), work=work, sites=sites),
            rope_rows=buffer.rope_rows[:size],
            states=None if self._states is None else self._states.batch(size),
        )


class DecodeStates:
    """The recurrent states of decode steps at fixed addresses."""

    def __init__(self, arena: Tensor, layout: StateLayout) -> None:
        self._cells, self._layout = state_cells(arena, layout), layout
        num_rows, device = BATCH_SIZES[-1], arena.device
        self._row_ends = torch.arange(1, num_rows + 1, device=device)
        self._words = torch.zeros(num_rows, 2, dtype=torch.int64, device=device)
        self._sources, self._targets = (
            torch.full((num_rows, layout.num_blocks), -1, dtype=torch.int64, device=device)
            for _ in range(2)
        )

    def fill(self, rows: Sequence[Sequence[StateSpan]]) -> None:
        """Copy the only span of each row, of one token, to the device. The other rows are padding,
        without a token."""
        words = torch.zeros(len(self._words), 2, dtype=torch.int64)
        words[: len(rows), 0] = torch.arange(len(rows))
        words[: len(rows), 1] = words[: len(rows), 0] + 1
        copy_into(self._words, words)
        if rows:
            spans = [span for row in rows for span in row]
            for table, numbers in zip(
                (self._sources, self._targets), blocks_of(spans, self._layout), strict=True
            ):
                copy_into(table[: len(rows)], torch.from_numpy(numbers))

    def batch(self, size: int) -> StateBatch:
        """The first `size` rows."""
        return StateBatch(
            self._cells,
            self._layout,
            self._row_ends[:size],
            self._words[:size],
            self._sources[:size],
            self._targets[:size],
            num_single=size,
            longest=0,
        )
