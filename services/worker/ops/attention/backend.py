"""The attention seam, after the attention page of TensorRT-LLM's PyTorch backend.

A backend is one `AttentionBackend` per layer, built with the model, and one `AttentionMetadata` per
step, filled by the runner and completed by `prepare`. Field names are that page's, so that a reader
who knows it, and a backend written against it, feel at home.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:  # the model's types lie above attention
    from loraplex_services.worker.types.model_config import ModelConfig


class AttentionMask(enum.Enum):
    """Which keys a query sees."""

    CAUSAL = "causal"
    FULL = "full"


class KvCache(Protocol):
    """What a backend needs of the KV cache's storage."""

    tokens_per_block: int

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each KV group."""
        ...

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer in every block, each `[num_blocks, Hkv, T, D]`."""
        ...

    def group_of(self, layer: int) -> int:
        """KV group of a layer."""
        ...


@dataclass(frozen=True, slots=True)
class KvCacheParams:
    """Where each sequence's KV lies."""

    use_cache: bool
    """False: a pass without cache (pooling); nothing is written, contexts see themselves only."""
    num_cached_tokens_per_seq: tuple[int, ...] = ()
    """Positions that are in the cache before this step."""
    block_tables: tuple[Sequence[Sequence[int]], ...] = ()
    """Per KV group, per sequence: block ids in position order. Ids behind a window are void."""


@dataclass(slots=True)
class AttentionMetadata:
    """One batch as attention sees it: contexts first, then generations."""

    num_contexts: int
    num_generations: int
    num_tokens: int
    num_ctx_tokens: int
    """Tokens of the contexts."""
    seq_lens: Tensor
    """int64 `[num_requests]` on the CPU: new tokens of each sequence in this step."""
    prompt_lens: Sequence[int]
    request_ids: Sequence[str]
    kv_cache_params: KvCacheParams
    kv_cache_manager: KvCache | None = None
    """The cache's storage; None without a cache."""
    position_ids: Tensor | None = None
    """int64 `[num_tokens]`, on the device."""
    max_num_requests: int = 0
    max_num_tokens: int = 0
    is_cuda_graph: bool = False
    is_dummy_attention: bool = False
    """A profiling run: shapes only, the cache is neither read nor written."""
    seq_lens_cuda: Tensor | None = None
    """`seq_lens` on the device."""
    context_lens: Tensor = field(init=False)
    """`seq_lens` of the contexts."""

    def __post_init__(self) -> None:
        self.context_lens = self.seq_lens[: self.num_contexts]

    def context_spans(self) -> tuple[tuple[int, int, int], ...]:
        """Per context: (first token row, end row, position of the first)."""
        starts = self.kv_cache_params.num_cached_tokens_per_seq or [0] * self.num_contexts
        spans, row = [], 0
        for num, start in zip(self.context_lens.tolist(), starts, strict=False):
            spans.append((row, row + num, start))
            row += num
        return tuple(spans)

    def prepare(self) -> None:
        """Complete a backend's own fields from the predefined ones; called once for each step."""

    def begin_forward(self) -> None:
        """Launch what all layers share. Called at the beginning of each forward pass, so a captured
        step contains it: it may read inputs on the device and must not wait for them."""


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """One generation in each row, at addresses that a captured step reads again and again."""

    cache: KvCache
    positions: Tensor
    """int64 `[size]`."""
    places: tuple[Tensor, ...]
    """Per KV group: int64 `[size]`, block * T + slot of each new token; -1 for a padding row."""
    tables: tuple[Tensor, ...]
    """Per KV group: int32 `[rows, blocks]`: block ids in position order."""
    table_rows: Tensor
    """int32 `[size]`: the row of each generation in `tables`."""
    max_keys: int
    """The most keys that a row may see."""


class AttentionBackend(Protocol):
    """Attention of one layer."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        attention_mask: AttentionMask = AttentionMask.CAUSAL,
    ) -> Tensor:
        """Write this step's keys and values and attend to everything visible.

        Args:
            q: `[num_tokens, num_heads * head_dim]`, already rotated.
            k, v: `[num_tokens, num_kv_heads * head_dim]`.

        Returns:
            `[num_tokens, num_heads * head_dim]`.
        """
        ...


class AttentionKernels(Protocol):
    """What a device's attention library offers: layers, and metadata for each way of running a
    step. `ops/attention/triton_backend.py` is one; another implements these five methods."""

    def layer(
        self, config: ModelConfig, layer: int, sinks: Tensor | None = None
    ) -> RotatingBackend:
        """The backend of one layer; `sinks` as `Operators.attention` has them."""
        ...

    def metadata(self, **fields: Any) -> AttentionMetadata:
        """Metadata of one step, from the predefined fields of AttentionMetadata."""
        ...

    def static_metadata(self, inputs: StaticInputs) -> AttentionMetadata:
        """Metadata of a step that is captured once and replayed with other values in `inputs`."""
        ...

    def idle_metadata(self, cache: KvCache, positions: Tensor) -> AttentionMetadata:
        """Metadata of a step that leaves the cache as it is: a context of all `positions` but the
        last, if there are several, and a generation."""
        ...

    def warm_up_variants(self) -> tuple[int, ...]:
        """Sizes of idle steps, in tokens, that launch every kernel in every variant between them:
        after them nothing is compiled, whatever lengths and batches follow."""
        ...


@runtime_checkable
class RotatingBackend(AttentionBackend, Protocol):
    """A backend that turns queries and keys itself, on their way to the cache."""

    def rotate_and_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`forward` of rotated q and k, with the causal mask.

        Args:
            q, k, v: as `forward` takes them, not rotated; q may be mutated.
            cos_sin: `[num_tokens, 1, dim / 2]` each.
        """
        ...
