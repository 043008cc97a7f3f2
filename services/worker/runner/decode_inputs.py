"""The inputs of a decode step at fixed addresses, over which graphs are captured."""

from __future__ import annotations

from dataclasses import replace

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.metadata import StaticInputs
from loraplex_services.worker.ops.lora.step_work import MIN_RUNS, static_work
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.runner.block_tables import BlockTables
from loraplex_services.worker.runner.input_buffer import InputBuffer

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def batch_size_for(num_rows: int) -> int | None:
    """The smallest captured batch that holds `num_rows` rows."""
    return next((size for size in BATCH_SIZES if size >= num_rows), None)


class DecodeInputs:
    """Static inputs of pure-decode steps, and the batches that read them."""

    def __init__(
        self,
        kv: KvBuffer,
        lora: DeviceLora,
        tables: BlockTables,
        max_model_len: int,
        attention: AttentionMaker,
    ) -> None:
        self._kv = kv
        self._max_model_len = max_model_len
        self._attention = attention
        self.tables = tables
        self.buffer = InputBuffer(BATCH_SIZES[-1], BATCH_SIZES[-1], MIN_RUNS, tables)
        self._work = static_work(lora.tables, BATCH_SIZES[-1], self.buffer.runs)

    def batch(self, size: int, sites: frozenset[int], table: LoraBatch) -> ForwardBatch:
        """The batch that a graph of `size` rows reads.

        Args:
            sites: where adapters may add something; none = the base alone.
            table: names the adapters' tables.
        """
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
        )
