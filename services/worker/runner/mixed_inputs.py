"""The inputs of steps that compute prompts at fixed addresses, over which graphs are captured.

A mixed step has as many shapes as there are mixes of prompts and single tokens, but only attention
looks at where one sequence ends and the next begins, and it reads that from lists on the device.
Everything else sees token rows. So one graph serves all steps of up to a number of token rows.
(On an H200, an eager step of 256 prompt tokens and 64 decoding rows took 16.7 ms with the base
alone and 78 ms with 33 adapters, nearly all of it launches.)
"""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.metadata import StaticInputs
from loraplex_services.worker.ops.lora.long_runs import max_tiles, static_long_work, tile_words
from loraplex_services.worker.ops.lora.runs import divided
from loraplex_services.worker.ops.lora.step_work import MIN_RUNS, static_work
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.runner.input_buffer import InputBuffer
from loraplex_services.worker.runner.step_inputs import StepInputs

MIXED_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Token rows of captured steps. Padding costs nothing up to about 200 rows, which take as long as
reading the weights does; above that up to a third of the step, half of that on average. A step of
more token rows takes the device longer than its launches take the host, and runs eagerly."""
MAX_CONTEXTS = 64
"""The most prompts of a captured step. Each may need a tile of queries of its own, and a launch has
as many programs as there may be tiles."""


class MixedInputs:
    """Implements `cuda_graphs.GraphInputs` for steps that compute prompts."""

    def __init__(
        self,
        kv: KvBuffer,
        lora: DeviceLora,
        tables: BlockTables,
        max_num_tokens: int,
        max_model_len: int,
        attention: AttentionMaker,
    ) -> None:
        """
        Args:
            max_num_tokens: the most token rows of any step: no larger size is captured.
        """
        self._kv = kv
        self._attention = attention
        self._max_model_len = max_model_len
        self.sizes = tuple(size for size in MIXED_SIZES if size <= max_num_tokens)
        num_tokens = max(self.sizes, default=1)
        self.buffer = InputBuffer(
            num_tokens, tables.device.shape[1], MIN_RUNS, tables, max_tiles(num_tokens)
        )
        self._lora_tables = lora.tables
        self._work = static_work(lora.tables, num_tokens, self.buffer.runs)
        self._long_work = static_long_work(lora.tables, self.buffer.tiles)

    def size_for(self, step: StepInputs) -> int | None:
        """See `GraphInputs`."""
        if step.plan.num_contexts > MAX_CONTEXTS:
            return None
        return next((size for size in self.sizes if size >= step.num_token_rows), None)

    def clear(self) -> None:
        """Fill with padding."""
        self.buffer.clear()

    def fill(self, step: StepInputs, batch: ForwardBatch) -> None:
        """Copy a step to the device, to be computed by `batch`."""
        short, long = divided(step.runs)
        self.buffer.fill(step, short, tile_words(self._lora_tables, long))
        lens, starts = step.num_tokens.tolist(), step.starts.tolist()
        table_rows = self.buffer.table_rows.tolist()
        batch.attention.fill(lens, starts, table_rows, step.plan.num_contexts)

    def batch(self, size: int, sites: frozenset[int], table: LoraBatch) -> ForwardBatch:
        """See `GraphInputs`."""
        work, long = (self._work, self._long_work) if sites else (None, None)
        buffer, positions = self.buffer, self.buffer.positions[:size]
        attention = StaticInputs(
            kv_slots=tuple(kv_slots[:size] for kv_slots in buffer.kv_slots),
            tables=tuple(buffer.block_tables.device),
            table_rows=buffer.decode_rows,
            max_keys=self._max_model_len,
            max_contexts=min(size, MAX_CONTEXTS),
        )
        return ForwardBatch(
            input_ids=buffer.input_ids[:size],
            positions=positions,
            attention=self._attention.graph_metadata(self._kv, positions, attention),
            lora=replace(table, runs=(), work=work, long=long, sites=sites),
            rope_rows=buffer.rope_rows[:size],
        )
