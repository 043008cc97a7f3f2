"""Eager passes before the first request, so that no kernel is compiled and no library allocates
while a request waits. They read one block of the arena, whatever it contains, and write none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.attention.backend import AUTO, AttentionMaker
from loraplex_services.worker.ops.linear import triton as linear
from loraplex_services.worker.ops.lora.launch_plan import TILE_ROWS
from loraplex_services.worker.ops.lora.long_runs import make_long_work
from loraplex_services.worker.ops.lora.runs import LONG_MIN_ROWS
from loraplex_services.worker.ops.lora.step_work import MIN_RUNS, StepWork, WorkSize
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.recurrence.backend import idle_states
from loraplex_services.worker.ops.sampling.triton import draw
from loraplex_services.worker.ops.sampling.truncation import truncate

MIXED_ROWS = 128
ALIGNED_WIDTH = 16
"""Triton compiles a kernel again for integers that are multiples of this number."""


@dataclass(frozen=True, slots=True, eq=False)
class IdleSteps:
    """Steps of one base that append nothing to the cache and keep no state."""

    model: Decoder
    kv: KvBuffer
    lora: DeviceLora
    attention: AttentionMaker
    sites: frozenset[int]
    """Where adapters may add something."""

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int) -> None:
        """Run one step of each family and each variant of attention, the largest step among
        them."""
        mixed = min(MIXED_ROWS + 1, max_num_tokens)
        of_attention, of_linears = self.attention.backend.warm_up_sizes, linear.warm_up_sizes()
        sizes = {1, *of_attention, *of_linears, mixed, max_num_tokens}
        for num_rows in sorted(size for size in sizes if size <= max_num_tokens):
            hidden = self.model.forward(self.batch(num_rows))
            rows = hidden[: linear.MOST.block_rows]
            logits = self.model.logits(rows, LoraBatch((), {}, None, self.lora.tables))
            warm_up_sampling(logits[:1])
        if self.attention.kv_cache_dtype != AUTO:
            # Keys of a pass without a cache are no codes, and other kernels read them.
            for num_rows in (1, max_num_tokens):
                idle = self.batch(num_rows)
                passing = self.attention.pass_metadata(idle.positions)
                self.model.forward(replace(idle, attention=passing))
        num_runs = MIN_RUNS
        while num_runs < max_num_tokens // TILE_ROWS + MIN_RUNS:
            num_runs *= 2
            StepWork(self.lora.tables, WorkSize(1, num_runs, 1)).list_groups(1)

    def batch(self, num_rows: int) -> ForwardBatch:
        """A generation, and a context if there is more than one row, and adapters without rows. A
        step may have more rows than the context has positions, which then begin again: bases have
        tables of them."""
        tables = self.lora.tables
        device = tables.arena.device
        context = self.model.config.max_position_embeddings
        positions = torch.arange(num_rows, device=device) % context
        adapters = LoraBatch(
            (),
            {},
            None,
            tables,
            work=self.lora.begin((), num_rows),
            long=make_long_work(tables, ()) if num_rows >= LONG_MIN_ROWS else None,
            sites=self.sites,
        )
        states = None
        if self.kv.states is not None:
            states = idle_states(self.kv.arena.data, self.kv.states, num_rows)
        ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        attention = self.attention.idle_metadata(self.kv, positions)
        return ForwardBatch(ids, positions, attention, adapters, states=states)


def warm_up_sampling(logits: torch.Tensor) -> None:
    """Truncate and draw rows as wide as `logits` `[1, V]`, aligned and not: adapters that add
    tokens bring any width, and kernels are compiled for each alignment."""
    width = -(-logits.shape[1] // ALIGNED_WIDTH) * ALIGNED_WIDTH
    for num_tokens in (width, width + 1):
        scores = logits.new_zeros(1, num_tokens)
        truncate(scores, scores.new_tensor([[num_tokens, 0.5, 0.0]]))
        draw(scores, torch.zeros(1, 3, dtype=torch.int64, device=logits.device))
