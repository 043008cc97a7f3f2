"""Measures, by running it, how much memory the largest step needs besides weights and arena."""

from __future__ import annotations

import torch

from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.layers.triton_operators import TritonOperators
from loraplex_services.worker.model.decoder import Decoder
from loraplex_services.worker.ops.lora.device_tables import DeviceTables
from loraplex_services.worker.ops.lora.triton import DeviceLora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.runner.gpu_path import site_shapes
from loraplex_services.worker.runner.warm_up import IdleSteps


@torch.inference_mode()
def run_largest_step(
    model: Decoder,
    operators: Operators,
    kv: KvBuffer,
    max_num_tokens: int,
    max_num_rows: int,
) -> torch.Tensor:
    """One step of `max_num_tokens` positions of the base that leaves the cache as it is, and the
    logits of `max_num_rows` of them.

    Args:
        kv: a cache of a few blocks, for this step alone.
    """
    assert isinstance(operators, TritonOperators), operators.name
    stored = kv.dtype
    shapes = site_shapes(model.site_weights.table, kv.arena.block_bytes // stored.itemsize)
    tables = DeviceTables(kv.arena.data.view(-1), stored, shapes, 1, len(shapes) + 1)
    operators.lora = lora = DeviceLora(tables, None)
    idle = IdleSteps(model, kv, lora, operators.attention_maker, frozenset())
    hidden = model.forward(idle.batch(max_num_tokens))
    return model.logits(hidden[:max_num_rows], LoraBatch((), {}, None, tables))


def measured_step_bytes(
    model: Decoder,
    operators: Operators,
    kv: KvBuffer,
    max_num_tokens: int,
    max_num_rows: int,
) -> int:
    """Bytes of GPU memory that the largest step allocates at once."""
    device = kv.arena.data.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_step(model, operators, kv, max_num_tokens, max_num_rows)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak - before
