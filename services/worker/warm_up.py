"""Eager passes before the first request, so that no kernel is compiled and no library allocates
while somebody waits. They read one block of the arena, whatever is in it, and write none."""

from __future__ import annotations

import torch

from services.worker.attention.backend import KvCacheParams
from services.worker.attention.triton import (
    MAX_SPLITS,
    TritonAttentionMetadata,
    decode_tiles,
)
from services.worker.kernels.lora.step_work import StepWork
from services.worker.kernels.lora.triton import RANK_STRIDE_STEP, DeviceLora
from services.worker.kernels.lora.tuned import tuned_plan
from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.kernels.sampling.triton import draw
from services.worker.kernels.sampling.truncation import truncate
from services.worker.memory.buffer import KvBuffer
from services.worker.model.batch import ForwardBatch
from services.worker.model.decoder import Decoder

MIXED_ROWS = 128
ALIGNED_WIDTH = 16
"""Triton compiles a kernel anew for integers that are multiples of this."""


@torch.inference_mode()
def warm_up(
    model: Decoder, kv: KvBuffer, lora: DeviceLora, sites: frozenset[int], max_num_tokens: int
) -> None:
    """Run one step of each family and of each number of splits, the largest step among them.

    Args:
        sites: where adapters may add something.
    """
    splits = 1
    while splits <= MAX_SPLITS:
        model.forward(idle_batch(kv, lora, sites, 0, splits))
        splits *= 2
    for num_rows in sorted({min(MIXED_ROWS, max_num_tokens - 1), max_num_tokens - 1}):
        hidden = model.forward(idle_batch(kv, lora, sites, num_rows, 1))
        logits = model.logits(hidden[:1], LoraBatch((), {}, None, lora.tables))
        warm_up_sampling(logits)


def warm_up_sampling(logits: torch.Tensor) -> None:
    """Truncate and draw rows as wide as `logits` `[1, V]`, aligned and not: adapters that add
    tokens bring any width, and kernels are compiled for each alignment."""
    width = -(-logits.shape[1] // ALIGNED_WIDTH) * ALIGNED_WIDTH
    for num_tokens in (width, width + 1):
        scores = logits.new_zeros(1, num_tokens)
        truncate(scores, scores.new_tensor([[num_tokens, 0.5, 0.0]]))
        draw(scores, torch.zeros(1, 3, dtype=torch.int64, device=logits.device))


def idle_batch(
    kv: KvBuffer, lora: DeviceLora, sites: frozenset[int], num_context_rows: int, num_splits: int
) -> ForwardBatch:
    """A context and a generation that append nothing to the cache, and adapters without rows."""
    device, num_rows = lora.tables.arena.device, num_context_rows + 1
    num_contexts = int(num_context_rows > 0)
    positions = torch.arange(num_rows, device=device)
    num_groups, num_blocks = len(kv.windows), -(-num_rows // kv.tokens_per_block)
    tables = torch.zeros(num_contexts + 1, num_blocks, dtype=torch.int32, device=device)
    tiles = decode_tiles([0], num_contexts, num_context_rows)
    attention = TritonAttentionMetadata(
        num_contexts=num_contexts,
        num_generations=1,
        num_tokens=num_rows,
        num_ctx_tokens=num_context_rows,
        seq_lens=torch.tensor([num_context_rows] * num_contexts + [1]),
        prompt_lens=(),
        request_ids=(),
        kv_cache_params=KvCacheParams(use_cache=True),
        kv_cache_manager=kv,
        position_ids=positions,
        tables=(tables,) * num_groups,
        places=(torch.full((num_rows,), -1, dtype=torch.int64, device=device),) * num_groups,
        decode_tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
        num_splits=num_splits,
        spans=((0, num_context_rows, 0),) * num_contexts,
    )
    plan = tuned_plan(num_rows, num_rows, kv.groups.itemsize, device)
    plan = lora.fit(plan, num_rows, RANK_STRIDE_STEP)
    work = StepWork(lora.tables, 1, plan, RANK_STRIDE_STEP)
    work.fill(())
    work.count()
    adapters = LoraBatch((), {}, None, lora.tables, (work,), sites)
    ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return ForwardBatch(ids, positions, attention, adapters)
