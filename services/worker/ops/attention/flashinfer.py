"""Attention by FlashInfer's kernels for a paged cache.

Keys and values are rotated and written by the kernels of `triton_backend`, so that only the
attention itself differs. Contexts and generations are one batch of FlashInfer's prefill wrapper,
for which a generation is a sequence with one query. The wrapper is planned on the host from the
lengths of a step before its first launch. Therefore steps are not captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.errors import Unsupported
from loraplex_services.worker.ops.attention.backend import AttentionMaker
from loraplex_services.worker.ops.attention.metadata import (
    PASS_BLOCK_TOKENS,
    AttentionMetadata,
    StaticInputs,
)
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.ops.attention.triton_backend import (
    LayerCache,
    TritonAttention,
    TritonAttentionMetadata,
)
from loraplex_services.worker.transfers import to_device

NAME = "flashinfer"
HEAD_DIMS = (64, 128, 256)
"""Widths of heads for which every release of FlashInfer has kernels."""
WORKSPACE_BYTES = 384 << 20
"""Partial sums of keys that are split. FlashInfer recommends 128 MiB, but float32 values of all
query heads, in as many tiles of 128 queries as a large GPU runs at a time, need more if 64 query
heads share few KV heads. A plan that does not fit is an error."""

WrapperClass: TypeAlias = Callable[..., Any]
"""`flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""
Kind: TypeAlias = tuple[int, HeadShape, bool]
"""KV group, heads, and whether the mask is full: layers of one kind share a plan."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The keys of a step's sequences in one KV group; int32, on the host except `blocks`."""

    query_begins: Tensor
    """`[n + 1]`: the first token row of each sequence, and the end."""
    page_begins: Tensor
    """`[n + 1]`: the first entry of each sequence in `blocks`, and the end."""
    blocks: Tensor
    """Block ids from each sequence's first visible one on."""
    last_lens: Tensor
    """`[n]`: keys in the last block."""
    key_lens: Tensor
    """`[n]`: keys in all blocks."""


@dataclass(slots=True)
class _Plan:
    wrapper: Any
    copied: torch.cuda.Event | None = None
    """The copy of the plan from a buffer on the host, which the next plan overwrites."""


class Plans:
    """FlashInfer's wrappers, one for each kind of layer, for the steps of a runner, which run one
    after another."""

    def __init__(self, wrapper_class: WrapperClass, device: torch.device) -> None:
        self._wrapper_class = wrapper_class
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans: dict[Kind, _Plan] = {}

    def make(self, kind: Kind, pages: Pages, block_tokens: int, dtype: torch.dtype) -> Any:
        """The wrapper of a kind of layers, planned for a step."""
        if kind not in self._plans:
            # The workspace is shared, since layers run one after another. "fa2" takes blocks at any
            # distance from each other on every GPU.
            wrapper = self._wrapper_class(self._workspace, kv_layout="HND", backend="fa2")
            self._plans[kind] = _Plan(wrapper)
        plan, (_, shape, is_full) = self._plans[kind], kind
        if plan.copied is not None:
            plan.copied.synchronize()
        # FlashInfer does not count the query's own key.
        window_left = -1 if is_full or shape.window is None else shape.window - 1
        plan.wrapper.plan(
            pages.query_begins,
            pages.page_begins,
            pages.blocks,
            pages.last_lens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            block_tokens,
            causal=not is_full,
            sm_scale=shape.scale,
            window_left=window_left,
            logits_soft_cap=shape.softcap,
            q_data_type=dtype,
            seq_lens=pages.key_lens,
        )
        if self._workspace.is_cuda:
            plan.copied = torch.cuda.Event()
            plan.copied.record()
        return plan.wrapper


@dataclass(slots=True)
class FlashInferMetadata(TritonAttentionMetadata):
    """Adds the pages of each sequence, and plans."""

    plans: Plans | None = None
    _pages: dict[int, Pages] = field(init=False, default_factory=dict)
    _wrappers: dict[Kind, Any] = field(init=False, default_factory=dict)

    def create_cuda_graph_metadata(self, inputs: StaticInputs) -> TritonAttentionMetadata:
        """Refused: see the docstring of the module."""
        AttentionMetadata.create_cuda_graph_metadata(self, inputs)
        raise AssertionError("refused")

    def begin_forward(self) -> None:
        """The first layer of each kind makes its plan."""

    def wrapper(self, kind: Kind, dtype: torch.dtype) -> Any:
        """The wrapper of a kind of layers, planned for this step once."""
        if kind not in self._wrappers:
            assert self.plans is not None, "made by flashinfer_attention"
            group, shape, _ = kind
            if group not in self._pages:
                self._pages[group] = self._make_pages(group, shape.window)
            pages = self._pages[group]
            self._wrappers[kind] = self.plans.make(kind, pages, self._block_tokens, dtype)
        return self._wrappers[kind]

    @property
    def _block_tokens(self) -> int:
        if not self.kv_cache_params.use_cache:
            return PASS_BLOCK_TOKENS
        assert self.kv_cache_manager is not None
        return self.kv_cache_manager.tokens_per_block

    def _make_pages(self, group: int, window: int | None) -> Pages:
        """All layers of a group have its window. Blocks behind it are left out: FlashInfer
        multiplies what is in them with 0, which is NaN if they hold something else by now."""
        assert self.position_ids is not None
        device, size, table = self.position_ids.device, self._block_tokens, self.tables[group]
        lens = self.seq_lens.numpy()
        starts = np.zeros_like(lens)
        if self.kv_cache_params.use_cache:
            starts[:] = self.kv_cache_params.num_cached_tokens_per_seq
        firsts = np.zeros_like(lens)
        if window is not None:
            firsts = np.maximum(0, starts - window + 1) // size
        counts = -(-(starts + lens) // size) - firsts
        begins = _begins(counts)
        rows = np.arange(len(lens)) if self.table_rows is None else np.asarray(self.table_rows)
        # Entry i of sequence s is at table[rows[s], firsts[s] + i].
        first_entries = rows * table.shape[1] + firsts - begins[:-1]
        entries = np.repeat(first_entries, counts) + np.arange(begins[-1])
        blocks = table.view(-1).index_select(0, to_device(torch.from_numpy(entries), device))
        key_lens = starts + lens - firsts * size
        on_host = (_begins(lens), begins, key_lens - (counts - 1) * size, key_lens)
        queries, pages, last_lens, key_lens_tensor = (_on_host(x, device) for x in on_host)
        return Pages(queries, pages, blocks, last_lens, key_lens_tensor)


def _begins(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of them begins if they lie one after another, and the end."""
    return np.concatenate(([0], np.cumsum(counts)))


def _on_host(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """int32; pinned if they will be copied to a GPU."""
    tensor = torch.from_numpy(values.astype(np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


class FlashInferAttention(TritonAttention):
    """One layer."""

    Metadata = FlashInferMetadata
    kv_cache_dtypes = frozenset[str]()  # its kernels take a scale of a layer, not of a token
    captures_graphs = False

    def __init__(self, *args: Any, **others: Any) -> None:
        """See `AttentionBackend`.

        Raises:
            Unsupported: FlashInfer has no kernels for heads of this size, or with sinks.
        """
        super().__init__(*args, **others)
        if self.shape.head_dim not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise self._refused(f"has head_dim {self.shape.head_dim}, FlashInfer takes {sizes}")
        if self.sinks is not None:
            raise self._refused("has attention sinks, which these kernels of FlashInfer ignore")

    def _refused(self, why: str) -> Unsupported:
        why = f"layer {self.layer_idx} {why}; use triton"
        return Unsupported.field("attention_backend", NAME, why)

    def _attend(
        self,
        out: Tensor,
        q: Tensor,
        cache: LayerCache,
        metadata: TritonAttentionMetadata,
        *,
        is_full: bool,
    ) -> None:
        """See `TritonAttention`."""
        assert isinstance(metadata, FlashInferMetadata), type(metadata)
        wrapper = metadata.wrapper((cache.group, self.shape, is_full), q.dtype)
        heads = (self.shape.num_heads, self.shape.head_dim)
        wrapper.run(q.unflatten(1, heads), cache.planes, out=out.unflatten(1, heads))


def flashinfer_attention(wrapper_class: WrapperClass, device: torch.device) -> AttentionMaker:
    """The backend of one runner, whose steps share a workspace."""
    fields = {"plans": Plans(wrapper_class, device)}
    return AttentionMaker(FlashInferAttention, name=NAME, metadata_fields=fields)
