"""What the engine asks of whoever computes a step. No torch: this is the seam to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loraplex.adapter_format.geometry import Geometry
from services.worker.request import SampledRow, StepPlan


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded base that doors and the engine need."""

    vocab_size: int
    """Logit width of the base; every id below it is a legal prompt token."""
    max_model_len: int
    """Context in tokens, prompt and output together."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    device: str
    """"cpu" or "cuda"."""
    numerics_fingerprint: str
    """Equal fingerprints give equal tokens in float32."""
    geometry: Geometry
    """What adapters are validated against."""


class Runner(Protocol):
    """One base on one device: the arena's bytes, the adapters' tables, the forward pass."""

    arena_blocks: int
    block_bytes: int
    tokens_per_block: int
    num_kv_groups: int
    kv_group_windows: tuple[int | None, ...]
    """Sliding window of each KV group in tokens; None = full attention."""

    def adapter_blocks(self, path: Path) -> int:
        """Blocks that the adapter in a verified folder needs. Reads headers only."""
        ...

    def load_adapter(self, slot: int, path: Path, blocks: Sequence[int]) -> None:
        """Copy an adapter into `blocks` and enter it under `slot`, which is not in use."""
        ...

    def unload_adapter(self, slot: int) -> None:
        """Take `slot` out of the tables. The caller frees the blocks."""
        ...

    def execute(self, plan: StepPlan) -> list[SampledRow]:
        """One forward pass and sampling; results in the order of `plan.rows`."""
        ...

    def model_info(self) -> ModelInfo:
        """Facts about the base."""
        ...
