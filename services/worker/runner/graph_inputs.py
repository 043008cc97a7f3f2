"""The inputs of steps at fixed addresses, over which graphs are captured.

A step that computes prompts has as many shapes as there are mixes of prompts and single tokens.
Only attention looks at where one sequence ends and the next begins, and it reads that from lists on
the device. Everything else sees token rows, so one graph serves all steps of up to a number of
token rows. (On an H200, an eager step of 256 prompt tokens and 64 decoding rows took 16.7 ms with
the base alone and 78 ms with 33 adapters, nearly all of it launches.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.cache.state_layout import StateLayout
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.metadata import StaticInputs
from loraplex_services.worker.ops.lora.long_runs import max_tiles, static_long_work, tile_words
from loraplex_services.worker.ops.lora.runs import divided
from loraplex_services.worker.ops.lora.step_work import MIN_RUNS, static_work
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.recurrence.backend import StateBatch, blocks_of, state_cells
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.runner.input_buffer import InputBuffer
from loraplex_services.worker.runner.step_inputs import StepInputs
from loraplex_services.worker.transfers import copy_into
from loraplex_services.worker.types.step_plan import StateSpan

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Token rows of captured steps that only decode."""
MIXED_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Token rows of captured steps that compute prompts. Padding costs nothing up to about 200 rows,
which take as long as reading the weights does. Above that, it costs up to a third of the step, and
half of that on average. A step of more token rows takes the device longer than its launches take
the host, and runs eagerly."""
MAX_CONTEXTS = 64
"""The most prompts of a captured step. Each may need a tile of queries of its own, and a launch has
as many programs as there may be tiles."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """The steps that share the graphs of one `GraphInputs`."""

    name: str
    sizes: tuple[int, ...]
    """Token rows of captured steps, ascending."""
    max_contexts: int = 0
    """The most prompts; 0 = steps that only decode, in which no run counts as long."""


DECODE = StepKind("decode", DECODE_SIZES)


def mixed_kind(max_num_tokens: int) -> StepKind:
    """Steps that compute prompts, none of which has more than `max_num_tokens` token rows."""
    sizes = tuple(size for size in MIXED_SIZES if size <= max_num_tokens)
    return StepKind("mixed", sizes, MAX_CONTEXTS)


class GraphInputs:
    """The static inputs of one kind of step: those of the largest, of which smaller steps fill the
    first rows."""

    def __init__(
        self,
        kind: StepKind,
        kv: KvBuffer,
        lora: DeviceLora,
        tables: BlockTables,
        attention: AttentionMaker,
    ) -> None:
        self.kind = kind
        self._kv = kv
        self._attention = attention
        self._lora_tables = lora.tables
        num_tokens = max(kind.sizes, default=1)
        num_rows, num_tiles = num_tokens, 0
        if kind.max_contexts:
            num_rows, num_tiles = tables.device.shape[1], max_tiles(num_tokens)
        self.buffer = InputBuffer(num_tokens, num_rows, MIN_RUNS, tables, num_tiles)
        self._work = static_work(lora.tables, num_tokens, self.buffer.runs)
        self._long_work = None
        if kind.max_contexts:
            self._long_work = static_long_work(lora.tables, self.buffer.tiles)
        self._states = None if kv.states is None else DecodeStates(kv.arena.data, kv.states)

    def size_for(self, step: StepInputs) -> int | None:
        """The smallest size that holds a step; None if there is none."""
        if step.plan.num_contexts > self.kind.max_contexts:
            return None
        return next((size for size in self.kind.sizes if size >= step.num_token_rows), None)

    def clear(self) -> None:
        """Fill with padding."""
        self.buffer.clear()
        if self._states is not None:
            self._states.fill(())

    def fill(self, step: StepInputs, batch: ForwardBatch) -> None:
        """Copy a step to the device, to be computed by `batch`."""
        if not self.kind.max_contexts:
            self.buffer.fill(step, step.runs)
        else:
            short, long = divided(step.runs)
            self.buffer.fill(step, short, tile_words(self._lora_tables, long))
            lens, starts = step.num_tokens.tolist(), step.starts.tolist()
            table_rows = self.buffer.table_rows.tolist()
            batch.attention.fill(lens, starts, table_rows, step.plan.num_contexts)
        if self._states is not None:
            self._states.fill(step.plan.states)

    def batch(self, size: int, sites: frozenset[int], table: LoraBatch) -> ForwardBatch:
        """The batch that a graph of `size` token rows reads.

        Args:
            sites: where adapters may add something; none = the base alone.
            table: names the adapters' tables.
        """
        work, long = (self._work, self._long_work) if sites else (None, None)
        buffer, positions = self.buffer, self.buffer.positions[:size]
        attention = StaticInputs(
            kv_slots=tuple(kv_slots[:size] for kv_slots in buffer.kv_slots),
            tables=tuple(buffer.block_tables.device),
            table_rows=buffer.decode_rows[:size],
            max_keys=buffer.block_tables.max_tokens,
            max_contexts=min(size, self.kind.max_contexts),
        )
        return ForwardBatch(
            input_ids=buffer.input_ids[:size],
            positions=positions,
            attention=self._attention.graph_metadata(self._kv, positions, attention),
            lora=replace(table, runs=(), work=work, long=long, sites=sites),
            rope_rows=buffer.rope_rows[:size],
            states=None if self._states is None else self._states.batch(size),
        )


class DecodeStates:
    """The recurrent states of decode steps at fixed addresses."""

    def __init__(self, arena: Tensor, layout: StateLayout) -> None:
        self._cells, self._layout = state_cells(arena, layout), layout
        num_rows, device = DECODE_SIZES[-1], arena.device
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
