"""Turns a StepPlan (plain Python) into a ForwardBatch (tensors)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.ropes import Ropes
from loraplex_services.worker.layers.routing import RoutingNotes
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.metadata import (
    AttentionMetadata,
    DeviceInputs,
    KvCacheParams,
)
from loraplex_services.worker.ops.lora.cpu_records import Records
from loraplex_services.worker.ops.lora.tables import DeltaTable
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.recurrence.backend import StateBatch, state_batch, state_cells
from loraplex_services.worker.runner.step_inputs import Int64s, StepInputs, read_plan
from loraplex_services.worker.transfers import to_device
from loraplex_services.worker.types.step_plan import StepPlan

if TYPE_CHECKING:  # Triton is not everywhere
    from loraplex_services.worker.runner.gpu_path import GpuPath


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """The parts that all batches of a runner share."""

    kv: KvBuffer
    ropes: Ropes
    deltas: DeltaTable
    max_num_tokens: int
    max_num_rows: int
    """Most requests of one step."""
    attention: AttentionMaker
    records: Records | None
    """The deltas as C++ reads them, where it computes."""
    gpu: GpuPath | None = None
    """The deltas as Triton reads them, where it computes."""

    def read(self, plan: StepPlan) -> StepInputs:
        """The inputs of one step, in the plan's order."""
        return read_plan(plan, self.ropes)

    def make(self, step: StepInputs) -> ForwardBatch:
        """Tensors of one step, for an eager forward pass."""
        num_tokens, device_inputs = step.num_token_rows, None
        rope_rows: torch.Tensor | None = None
        if self.gpu is not None and step.plan.uses_cache and self.gpu.holds(step):
            buffer = self.gpu.eager_inputs(step)
            device_inputs = buffer.device_inputs(step)
            input_ids, positions = buffer.input_ids[:num_tokens], buffer.positions[:num_tokens]
            if step.rope_rows is not None:
                rope_rows = buffer.rope_rows[:num_tokens]
        else:
            input_ids, positions = (
                self._on_device(step.token_ids),
                self._on_device(step.positions()),
            )
            if step.rope_rows is not None:
                rope_rows = self._on_device(step.per_token(step.rope_rows))
        if self.gpu is None:
            lora = LoraBatch(step.runs, self.deltas, self.records)
        else:
            lora = self.gpu.lora_batch(step.runs, num_tokens, step.is_decode)
        # With compiled kernels, the bits of a row do not depend on which others are computed.
        read_rows = None if self.records is None else step.read_rows
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            attention=self._attention(step, positions, device_inputs),
            lora=lora,
            rope_rows=rope_rows,
            states=self._states(step.plan),
            read_rows=None if read_rows is None else torch.from_numpy(read_rows),
            routing=RoutingNotes() if step.plan.notes_experts else None,
        )

    def _on_device(self, values: Int64s) -> torch.Tensor:
        return to_device(torch.from_numpy(values), self.kv.arena.data.device)

    def _states(self, plan: StepPlan) -> StateBatch | None:
        if (layout := self.kv.states) is None:
            return None
        assert len(plan.states) == len(plan.rows), "each row has its state"
        return state_batch(plan.states, state_cells(self.kv.arena.data, layout), layout)

    def _attention(
        self,
        step: StepInputs,
        position_ids: torch.Tensor,
        device_inputs: DeviceInputs | None,
    ) -> AttentionMetadata:
        rows, num_contexts = step.plan.rows, step.plan.num_contexts
        params = KvCacheParams(use_cache=False)
        if step.plan.uses_cache:
            groups = range(len(self.kv.windows))
            params = KvCacheParams(
                use_cache=True,
                num_cached_tokens_per_seq=tuple(step.starts.tolist()),
                block_tables=tuple(
                    [row.request.block_tables[group] for row in rows] for group in groups
                ),
            )
        metadata = self.attention.metadata(
            num_contexts=num_contexts,
            num_generations=len(rows) - num_contexts,
            num_tokens=len(position_ids),
            num_ctx_tokens=step.plan.num_context_tokens,
            seq_lens=torch.from_numpy(step.num_tokens),
            rows=rows,
            kv_cache_params=params,
            kv_cache_manager=self.kv if params.use_cache else None,
            position_ids=position_ids,
            max_num_requests=self.max_num_rows,
            max_num_tokens=self.max_num_tokens,
            device_inputs=device_inputs,
        )
        metadata.prepare()
        return metadata
