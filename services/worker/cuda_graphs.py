"""Pure-decode steps as CUDA graphs: one launch on the host instead of hundreds.

A graph is captured for each batch size of a short list, once for the base alone and once with
adapters. It reads its inputs at fixed addresses: `DecodeInputs` holds them for the largest batch,
and a step fills the first rows. Rows up to the batch size are padding that writes nothing: no cache
place, no keys, no adapter. Which adapters a step uses is read from device tables, so one graph
serves any mix. Everything else (contexts, several adapters in one request, embeddings or norms of
an adapter's own) runs eagerly, as does the head with sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.worker.attention.backend import KvCacheParams
from services.worker.attention.triton import (
    TritonAttentionMetadata,
    choose_splits,
    decode_tiles,
)
from services.worker.kernels.lora.plan import choose_plan
from services.worker.kernels.lora.triton import (
    DeviceLora,
    StepWork,
    disjoint_passes,
    unsplit,
)
from services.worker.kernels.lora.worklist import LoraBatch, RowRun
from services.worker.memory.buffer import KvBuffer
from services.worker.model.batch import ForwardBatch
from services.worker.model.decoder import Decoder
from services.worker.request import StepPlan

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
WARM_UP_RUNS = 2
"""Forward passes before a capture: kernels compile and libraries allocate in the first."""


def batch_size_for(num_rows: int) -> int | None:
    """The smallest captured batch that holds so many rows."""
    return next((size for size in BATCH_SIZES if size >= num_rows), None)


class DecodeInputs:
    """Static inputs of pure-decode steps, and the batches that read them."""

    def __init__(self, kv: KvBuffer, lora: DeviceLora, max_model_len: int, itemsize: int) -> None:
        device, rows = lora.tables.arena.device, BATCH_SIZES[-1]
        self._kv = kv
        self._lora = lora
        self._itemsize = itemsize
        self._max_model_len = max_model_len
        self._max_blocks = -(-max_model_len // kv.tokens_per_block)
        num_groups = len(kv.windows)
        self.input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tiles = torch.zeros(rows, 4, dtype=torch.int32, device=device)
        self.places = torch.full((num_groups, rows), -1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(
            num_groups, rows, self._max_blocks, dtype=torch.int32, device=device
        )
        self._works: dict[int, StepWork] = {}

    def accepts(self, plan: StepPlan, runs: Sequence[RowRun]) -> bool:
        """Whether a graph can compute the step."""
        return (
            plan.num_contexts == 0
            and 0 < len(plan.rows) <= BATCH_SIZES[-1]
            and all(row.num_tokens == 1 for row in plan.rows)
            and len(disjoint_passes(runs)) <= 1
            and all(self._lora.tables.kernels_do_all(run.slot) for run in runs)
        )

    def fill(self, plan: StepPlan, runs: Sequence[RowRun], size: int) -> None:
        """Copy a step to the device; rows after its last become padding up to `size`."""
        rows, num_padding = plan.rows, size - len(plan.rows)
        ids = [row.request.token_at(row.start) for row in rows] + [0] * num_padding
        starts = [row.start for row in rows]
        empty = [(0, 0, 0, 0)] * num_padding
        _copy(self.input_ids[:size], torch.tensor(ids))
        _copy(self.positions[:size], torch.tensor(starts + [0] * num_padding))
        tiles = decode_tiles(starts, 0, 0) + empty
        _copy(self.tiles[:size], torch.tensor(tiles, dtype=torch.int32))
        for group in range(len(self.tables)):
            tables = [row.request.block_tables[group] for row in rows]
            places = [
                self._place(table, start) for table, start in zip(tables, starts, strict=True)
            ]
            _copy(self.places[group, :size], torch.tensor(places + [-1] * num_padding))
            _copy(self.tables[group, : len(rows)], self._table(tables))
        if runs:
            self.work(size).fill(runs)

    def work(self, size: int) -> StepWork:
        """The adapters' work of a batch size; the kernel family is fixed with it."""
        if size not in self._works:
            # Runs may be of any length; tiles of 16 rows are good for one row and for many.
            plan = choose_plan(min(size, 16), size, self._itemsize)
            if not self._lora.holds(plan, size):
                plan = unsplit(plan)
            self._works[size] = StepWork(self._lora.tables, size, plan)
        return self._works[size]

    def batch(self, size: int, has_lora: bool, table: LoraBatch) -> ForwardBatch:
        """The batch that a graph of `size` rows reads; `table` names the adapters' tables."""
        works = (self.work(size),) if has_lora else ()
        return ForwardBatch(
            input_ids=self.input_ids[:size],
            positions=self.positions[:size],
            attention=self._metadata(size),
            lora=replace(table, runs=(), works=works),
        )

    def _metadata(self, size: int) -> TritonAttentionMetadata:
        num_kv_heads = self._kv.planes(0)[0].shape[1]
        return TritonAttentionMetadata(
            num_contexts=0,
            num_generations=size,
            num_tokens=size,
            num_ctx_tokens=0,
            seq_lens=torch.ones(size, dtype=torch.int64),
            prompt_lens=(),
            request_ids=(),
            kv_cache_params=KvCacheParams(use_cache=True),
            kv_cache_manager=self._kv,
            position_ids=self.positions[:size],
            max_num_requests=size,
            max_num_tokens=size,
            is_cuda_graph=True,
            tables=tuple(self.tables),
            places=tuple(places[:size] for places in self.places),
            decode_tiles=self.tiles[:size],
            num_splits=choose_splits(size, num_kv_heads, self._max_model_len),
        )

    def _place(self, table: Sequence[int], position: int) -> int:
        num_slots = self._kv.tokens_per_block
        return table[position // num_slots] * num_slots + position % num_slots

    def _table(self, tables: Sequence[Sequence[int]]) -> Tensor:
        """int32 `[rows, max_blocks]` on the host."""
        out = torch.zeros(len(tables), self._max_blocks, dtype=torch.int32)
        for row, table in zip(out, tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=torch.int32)
        return out


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy in stream order; pinned memory goes back to its pool when the copy is done."""
    if target.is_cuda:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph, what it reads and where it leaves its result."""

    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    """Kept for its workspaces, whose addresses the graph holds."""
    hidden: Tensor
    """`[size, H]`; the next replay overwrites it."""


class DecodeGraphs:
    """The captured steps of a runner."""

    def __init__(self, model: Decoder, inputs: DecodeInputs, table: LoraBatch) -> None:
        """`table`: a batch without runs that names the adapters' tables."""
        self._model = model
        self._inputs = inputs
        self._table = table
        self._steps: dict[tuple[int, bool], CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self) -> None:
        """Capture every batch size, largest first, so that the others fit into its memory."""
        began_s = time.monotonic()
        kinds = [(size, has_lora) for size in reversed(BATCH_SIZES) for has_lora in (False, True)]
        for i, (size, has_lora) in enumerate(kinds):
            self._steps[size, has_lora] = self._capture(size, has_lora)
            logger.info("captured graph %d of %d: %d rows", i + 1, len(kinds), size)
        logger.info("captured all graphs in %.1f s", time.monotonic() - began_s)

    def forward(self, plan: StepPlan, runs: Sequence[RowRun]) -> Tensor | None:
        """Hidden states `[rows, H]` of a pure-decode step; None when it must run eagerly."""
        size = batch_size_for(len(plan.rows))
        if size is None or not self._inputs.accepts(plan, runs):
            return None
        step = self._steps[size, bool(runs)]
        self._inputs.fill(plan, runs, size)
        step.graph.replay()
        return step.hidden[: len(plan.rows)]

    def _capture(self, size: int, has_lora: bool) -> CapturedStep:
        """Capture with padding rows only: what was in the cache stays as it is."""
        self._inputs.fill(StepPlan(0, ()), (), size)
        if has_lora:
            self._inputs.work(size).fill(())
        batch = self._inputs.batch(size, has_lora, self._table)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._forward(batch)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._forward(batch)
        return CapturedStep(graph, batch, hidden)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return forward_static(self._model, batch)


def forward_static(model: Decoder, batch: ForwardBatch) -> Tensor:
    """What a graph holds: count the adapters' work, then the forward pass."""
    for work in batch.lora.works or ():
        work.count()
    return model.forward(batch)
