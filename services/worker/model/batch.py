"""What one forward pass reads besides weights: an explicit argument of every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.worker.attention.backend import AttentionMetadata
from services.worker.kernels.lora.worklist import LoraBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens: contexts, then generations; inside each by first slot, base rows last."""

    input_ids: Tensor
    """int64 `[T]`."""
    positions: Tensor
    """int64 `[T]`, absolute."""
    attention: AttentionMetadata
    lora: LoraBatch
    is_long: Tensor | None = None
    """bool `[T]`: tokens of requests that are longer than the base's rotary embedding switches at;
    None where none is."""
