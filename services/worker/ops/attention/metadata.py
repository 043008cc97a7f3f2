"""The attention metadata of one batch, with the field names of TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loraplex.errors import Unsupported
from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.rope.torch import CosSin
from loraplex_services.worker.transfers import to_device
from loraplex_services.worker.types.step_plan import PlannedRow

PASS_BLOCK_TOKENS = 16
"""Tokens of a block of `PassPlanes`, as of the KV cache."""


@dataclass(frozen=True, slots=True)
class KvCacheParams:
    """Where each sequence's KV lies."""

    use_cache: bool
    """False: a pass without cache (pooling); nothing is written, contexts see themselves only."""
    num_cached_tokens_per_seq: tuple[int, ...] = ()
    """Positions that are in the cache before this step."""
    block_tables: tuple[Sequence[Sequence[int]], ...] = ()
    """Per KV group, per sequence: block ids in position order. Ids behind a window are void."""


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """Block tables and KV slots of a step if the runner keeps them on the device."""

    tables: tuple[Tensor, ...]
    """Per KV group: int32 `[rows, blocks]`: block ids in position order."""
    table_rows: Sequence[int]
    """The row of each sequence in `tables`."""
    kv_slots: tuple[Tensor, ...]
    """Per KV group: int64 `[num_tokens]`, block * T + slot of each new token; -1 = none."""
    decode_rows: Tensor
    """int32 `[num_generations]`: `table_rows` of the generations."""


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """One step's inputs, at addresses that a captured step reads again and again."""

    kv_slots: tuple[Tensor, ...]
    """Per KV group: int64 `[size]`, block * T + slot of each new token; -1 for a padding row."""
    tables: tuple[Tensor, ...]
    """Per KV group: int32 `[rows, blocks]`: block ids in position order."""
    table_rows: Tensor
    """int32 `[n]`: the row of each generation in `tables`. Without contexts, n is `size`."""
    max_keys: int
    """The most keys that a row may see."""
    max_contexts: int = 0
    """The most contexts, which come before the generations: `fill` says how many there are."""


@dataclass(slots=True)
class AttentionMetadata:
    """One batch: contexts first, then generations. A backend adds fields in a subclass.

    The runner makes one for each step with the predefined fields and calls `prepare`. A step that
    is captured as a CUDA graph has one that is made once and replayed.
    """

    num_contexts: int
    num_generations: int
    num_tokens: int
    num_ctx_tokens: int
    """Tokens of the contexts."""
    seq_lens: Tensor
    """int64 `[num_contexts + num_generations]` on the CPU: new tokens of each sequence."""
    kv_cache_params: KvCacheParams
    kv_cache_manager: KvBuffer | None = None
    """The cache's storage; None without a cache."""
    position_ids: Tensor | None = None
    """int64 `[num_tokens]`, on the device."""
    max_num_requests: int = 0
    """The most sequences of any batch of this runner."""
    max_num_tokens: int = 0
    """The most tokens of any batch of this runner."""
    is_cuda_graph: bool = False
    """A captured step: no tensor here is ever replaced, and generations may be padding."""
    is_dummy_attention: bool = False
    """A profiling run: shapes only, the cache is neither read nor written."""
    rows: Sequence[PlannedRow] = ()
    """The sequences; `request_ids` and `prompt_lens` are read from them when they are asked for.
    Empty in steps that no request is in."""
    device_inputs: DeviceInputs | None = None
    """Set if the runner keeps block tables on the device."""
    rotations: Sequence[CosSin] = ()
    """Rotations by layer, set by the model before its first layer for backends that rotate."""
    context_lens: Tensor = field(init=False)
    """`seq_lens` of the contexts."""
    _seq_lens_cuda: Tensor | None = field(init=False, default=None)
    _pass_planes: PassPlanes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.context_lens = self.seq_lens[: self.num_contexts]

    @property
    def request_ids(self) -> list[str]:
        """The request of each sequence."""
        return [row.request.request_id for row in self.rows]

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens in the prompt of each sequence."""
        return [len(row.request.prompt_ids) for row in self.rows]

    @property
    def seq_lens_cuda(self) -> Tensor:
        """`seq_lens` on the device of `position_ids`; copied at its first use."""
        if self._seq_lens_cuda is None:
            device = self.seq_lens.device if self.position_ids is None else self.position_ids.device
            self._seq_lens_cuda = to_device(self.seq_lens, device)
        return self._seq_lens_cuda

    def context_spans(self) -> tuple[tuple[int, int, int], ...]:
        """Per context: (first token row, end row, position of the first)."""
        starts = self.kv_cache_params.num_cached_tokens_per_seq or [0] * self.num_contexts
        spans, row = [], 0
        for num, start in zip(self.context_lens.tolist(), starts, strict=False):
            spans.append((row, row + num, start))
            row += num
        return tuple(spans)

    def pass_planes(self) -> PassPlanes:
        """Memory of a pass without a KV cache."""
        if self._pass_planes is None:
            assert not self.num_generations, "without a cache there are contexts only"
            self._pass_planes = PassPlanes(self.seq_lens.tolist())
        return self._pass_planes

    def prepare(self) -> None:
        """Complete a backend's own fields from the predefined ones; called once for each step."""

    def prepare_idle(self) -> None:
        """`prepare` for a step that leaves the cache as it is: a warm-up or a profiling run."""
        self.is_dummy_attention = True
        self.prepare()

    def create_cuda_graph_metadata(self, inputs: StaticInputs) -> AttentionMetadata:
        """This batch as a captured step has it.

        Every tensor is allocated here, once; what differs between replays is read from `inputs`
        and from `position_ids`, whose addresses stay.

        Raises:
            Unsupported: the backend's steps are not captured.
        """
        raise Unsupported.field(
            "is_cuda_graph", True, f"{type(self).__name__} has no metadata for captured steps"
        )

    def fill(
        self,
        lens: Sequence[int],
        starts: Sequence[int],
        table_rows: Sequence[int],
        num_contexts: int,
    ) -> None:
        """Prepare a replay of a captured step that may have contexts.

        Args:
            lens, starts: new tokens of each sequence, and the position of the first.
            table_rows: the row of each sequence in the block tables.

        Raises:
            Unsupported: the backend's steps with contexts are not captured.
        """
        raise Unsupported.field(
            "max_contexts", num_contexts, f"{type(self).__name__} captures no steps with contexts"
        )

    def begin_forward(self) -> None:
        """Launch what all layers share. Called at the beginning of each forward pass, so a captured
        step contains it: it may read inputs on the device and must not wait for them."""


class PassPlanes:
    """Keys and values of a pass without a KV cache, in blocks of their own. Layers of one shape
    share the memory, since they run one after another."""

    def __init__(self, lens: Sequence[int]) -> None:
        """`lens`: tokens of each sequence."""
        self.tables: list[list[int]] = []
        """Block ids of each sequence."""
        self.num_blocks = 0
        for num in lens:
            count = -(-num // PASS_BLOCK_TOKENS)
            self.tables.append(list(range(self.num_blocks, self.num_blocks + count)))
            self.num_blocks += count
        self._planes: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def planes(self, k: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
        """K and V, each `[num_blocks, Hkv, T, D]`, with the dtype and on the device of `k`."""
        size = (2, self.num_blocks, shape.num_kv_heads, PASS_BLOCK_TOKENS, shape.head_dim)
        kind = size, k.dtype
        if kind not in self._planes:
            self._planes[kind] = torch.empty(size, dtype=k.dtype, device=k.device)
        keys, values = self._planes[kind]
        return keys, values
