"""From a StepPlan, plain Python, to a ForwardBatch, tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.worker.attention.backend import AttentionMetadata, KvCacheParams
from services.worker.kernels.lora.records import Records
from services.worker.kernels.lora.runs import RowRun, row_runs
from services.worker.kernels.lora.tables import DeltaTable
from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.layers.ropes import Ropes
from services.worker.memory.buffer import KvBuffer
from services.worker.model.batch import ForwardBatch
from services.worker.request import PlannedRow, StepPlan
from services.worker.transfers import to_device

if TYPE_CHECKING:  # Triton is not everywhere
    from services.worker.gpu_path import GpuPath


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """What all batches of a runner share."""

    kv: KvBuffer
    ropes: Ropes
    deltas: DeltaTable
    device: torch.device
    max_num_tokens: int
    make_metadata: Callable[..., AttentionMetadata]
    """`Operators.make_metadata`."""
    records: Records | None
    """The deltas as C++ reads them, where it computes."""
    gpu: GpuPath | None = None
    """The deltas as Triton reads them, where it computes."""

    def make(self, plan: StepPlan) -> ForwardBatch:
        """Tensors of one step, in the plan's order."""
        token_ids: list[int] = []
        positions: list[int] = []
        for row in plan.rows:
            token_ids += row.input_ids()
            positions += range(row.start, row.start + row.num_tokens)
        position_ids = to_device(torch.tensor(positions), self.device)
        rope_rows = None
        by_row = [self.ropes.row(row.slots, row.request.is_long) for row in plan.rows]
        if any(by_row):
            counts = [row.num_tokens for row in plan.rows]
            rope_rows = torch.tensor(by_row).repeat_interleave(torch.tensor(counts))
            rope_rows = to_device(rope_rows, self.device)
        return ForwardBatch(
            input_ids=to_device(torch.tensor(token_ids), self.device),
            positions=position_ids,
            attention=self._attention(plan, position_ids),
            lora=self._lora(plan),
            rope_rows=rope_rows,
        )

    def _lora(self, plan: StepPlan) -> LoraBatch:
        runs = runs_of(plan)
        if self.gpu is not None:
            return self.gpu.lora_batch(runs, plan.num_tokens)
        return LoraBatch(runs, self.deltas, self.records)

    def _attention(self, plan: StepPlan, position_ids: torch.Tensor) -> AttentionMetadata:
        rows, num_contexts = plan.rows, plan.num_contexts
        seq_lens = torch.tensor([row.num_tokens for row in rows])
        num_groups = len(self.kv.windows)
        metadata = self.make_metadata(
            num_contexts=num_contexts,
            num_generations=len(rows) - num_contexts,
            num_tokens=len(position_ids),
            num_ctx_tokens=sum(row.num_tokens for row in rows[:num_contexts]),
            seq_lens=seq_lens,
            prompt_lens=[len(row.request.prompt_ids) for row in rows],
            request_ids=[row.request.request_id for row in rows],
            kv_cache_params=KvCacheParams(
                use_cache=True,
                num_cached_tokens_per_seq=tuple(row.start for row in rows),
                block_tables=tuple(
                    [row.request.block_tables[group] for row in rows] for group in range(num_groups)
                ),
            ),
            kv_cache_manager=self.kv,
            position_ids=position_ids,
            max_num_requests=len(rows),
            max_num_tokens=self.max_num_tokens,
        )
        metadata.prepare()
        return metadata


def runs_of(plan: StepPlan) -> tuple[RowRun, ...]:
    """The adapters of a step's token rows."""
    return row_runs(part for row in plan.rows for part in _segments(row))


def _segments(row: PlannedRow) -> list[tuple[int, Sequence[tuple[int, float]]]]:
    """Its tokens before and after its adapters begin to act."""
    num_plain = min(max(0, row.request.adapters_from - row.start), row.num_tokens)
    parts: list[tuple[int, Sequence[tuple[int, float]]]] = [(num_plain, ())]
    parts.append((row.num_tokens - num_plain, row.slots))
    return [part for part in parts if part[0]]
