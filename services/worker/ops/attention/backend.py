"""The attention interface, which follows the one of TensorRT-LLM's PyTorch backend.

A backend is one `AttentionBackend` for each layer, built with the model, and one
`AttentionMetadata` for each step, filled by the runner and completed by `prepare`. Names of fields
and arguments are those of TensorRT-LLM. `docs/internals/attention-backends.md` shows how to write a
backend.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.worker.arena_buffer import KvBuffer
from loraplex_services.worker.ops.attention.metadata import (
    AttentionMetadata,
    KvCacheParams,
    StaticInputs,
)
from loraplex_services.worker.ops.attention.shapes import HeadShape
from loraplex_services.worker.types.model_config import ModelConfig, RopeConfig

AUTO = "auto"
"""The model's dtype as the type of keys and values."""


class AttentionMask(enum.Enum):
    """The keys that a query sees."""

    CAUSAL = "causal"
    """Keys up to the query's position, and of these those of its window if the layer has one."""
    FULL = "full"
    """All keys of its sequence, in the cache and in the batch. Layers with a window, which do not
    keep them all, take it without a cache only."""


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How a backend stores keys and values."""

    kv_cache_dtype: str
    """Name of the type that keys and values are stored in."""


@dataclass(frozen=True, slots=True)
class PositionalEmbeddingParams:
    """The rotary embedding that a backend applies itself.

    Adapters may bring another than the base's, so the cosines and sines of each token come with the
    step, in `AttentionMetadata.rotations[layer_idx]`.
    """

    rope: RopeConfig
    """The base's, of this layer."""


class AttentionBackend(ABC):
    """Attention of one layer."""

    Metadata: ClassVar[type[AttentionMetadata]] = AttentionMetadata
    """The class of the metadata of a step that `forward` reads."""
    kv_cache_dtypes: ClassVar[frozenset[str]] = frozenset()
    """Types that keys and values can be stored in, in addition to the model's."""
    rotates: ClassVar[bool] = False
    """Whether it can apply a rotary embedding itself."""
    has_chunks: ClassVar[bool] = False
    """Whether it takes `is_chunked`."""
    captures_graphs: ClassVar[bool] = False
    """Whether steps of generations can be captured as CUDA graphs: see
    `create_cuda_graph_metadata`."""
    captures_contexts: ClassVar[bool] = False
    """Whether steps with contexts can be captured as well: see `AttentionMetadata.fill`."""
    warm_up_sizes: ClassVar[tuple[int, ...]] = (2,)
    """Sizes of idle steps, in tokens, that launch every kernel in every variant between them:
    after them nothing is compiled, whatever lengths and batches follow."""

    def __init__(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        quant_config: QuantConfig | None = None,
        pos_embd_params: PositionalEmbeddingParams | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        is_chunked: bool = False,
        sinks: Tensor | None = None,
    ) -> None:
        """
        Args:
            num_kv_heads: None = as many as query heads.
            quant_config: None = keys and values are stored in the model's dtype.
            pos_embd_params: None = queries and keys come rotated.
            scale: of scores; None = 1 / sqrt(head_dim).
            softcap: scores s become softcap * tanh(s / softcap).
            window: keys that a query sees with the causal mask, its own included; None = all.
            is_chunked: whether windows begin at multiples of their size instead.
            sinks: float32 `[num_heads]`, a score of each query head in addition to those of the
                keys, which has no value.

        Raises:
            InvalidRequest: the backend cannot store keys as asked, or cannot rotate.
        """
        if quant_config is not None and quant_config.kv_cache_dtype not in self.kv_cache_dtypes:
            known = ", ".join(sorted(self.kv_cache_dtypes)) or "no other type than the model's"
            why = f"{type(self).__name__} stores keys and values in {known}"
            raise InvalidRequest.field("kv_cache_dtype", quant_config.kv_cache_dtype, why)
        if pos_embd_params is not None and not self.rotates:
            why = f"{type(self).__name__} takes queries and keys that are rotated"
            raise InvalidRequest.field("pos_embd_params", "a rotary embedding", why)
        self.layer_idx = layer_idx
        self.quant_config = quant_config
        self.pos_embd_params = pos_embd_params
        self.sinks = sinks
        self.shape = HeadShape(
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            head_dim,
            head_dim**-0.5 if scale is None else scale,
            softcap,
            window,
            is_chunked,
        )

    @classmethod
    def for_heads(
        cls, layer_idx: int, shape: HeadShape, sinks: Tensor | None = None, **others: Any
    ) -> Self:
        """A layer with these heads; `others` are further arguments.

        Raises:
            Unsupported: the backend knows sliding windows only.
        """
        if shape.is_chunked:
            if not cls.has_chunks:
                why = f"{cls.__name__} has no attention in chunks; use vanilla or cpu"
                raise Unsupported.field("attention_backend", cls.__name__, why)
            others["is_chunked"] = True
        return cls(
            layer_idx,
            shape.num_heads,
            shape.head_dim,
            shape.num_kv_heads,
            scale=shape.scale,
            softcap=shape.softcap,
            window=shape.window,
            sinks=sinks,
            **others,
        )

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        metadata: AttentionMetadata,
        attention_mask: AttentionMask | None = None,
    ) -> Tensor:
        """Write this step's keys and values and attend to everything visible.

        Args:
            q: `[num_tokens, num_heads * head_dim]`; may be mutated. Without k and v it is the fused
                `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, as `split` cuts it. Rows
                may lie apart.
            k, v: `[num_tokens, num_kv_heads * head_dim]`.
            attention_mask: None = causal.

        Returns:
            `[num_tokens, num_heads * head_dim]`.
        """

    def sees_all(self, metadata: AttentionMetadata, attention_mask: AttentionMask | None) -> bool:
        """Whether a query sees all keys of its sequence.

        Raises:
            Unsupported: the keys are in the cache, of which the layer keeps the last ones only.
        """
        if attention_mask is not AttentionMask.FULL:
            return False
        if self.shape.window is not None and metadata.kv_cache_params.use_cache:
            why = f"layer {self.layer_idx} keeps the keys of its window only; run without a cache"
            raise Unsupported.field("attention_mask", attention_mask.value, why)
        return True

    def split(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, as views if they come fused."""
        if k is not None and v is not None:
            return q, k, v
        width, kv_width = self.shape.q_size, self.shape.kv_size
        assert k is None and v is None and q.shape[1] == width + 2 * kv_width, q.shape
        q, k, v = q.split((width, kv_width, kv_width), dim=1)
        return q, k, v


class AttentionMaker:
    """Makes the layers and the metadata of one kind of backend."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        *,
        name: str = "",
        layer_fields: Mapping[str, Any] | None = None,
        metadata_fields: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            name: in the numerics fingerprint; "" if the operators say which backend it is.
            layer_fields, metadata_fields: further arguments of each layer, and of each metadata.
        """
        self.backend = backend
        self.name = name
        self.kv_cache_dtype = AUTO
        """The type in which keys and values are stored; set before the layers are made."""
        self._layer_fields = layer_fields or {}
        self._metadata_fields = metadata_fields or {}

    def layer(
        self, config: ModelConfig, layer: int, sinks: Tensor | None = None, *, rotated: bool = False
    ) -> AttentionBackend:
        """The backend of one layer. `rotated`: queries and keys come rotated, even if it can."""
        params = None
        if self.backend.rotates and not rotated:
            params = PositionalEmbeddingParams(config.ropes[layer])
        shape = HeadShape.of(config, layer)
        others = {"pos_embd_params": params, **self._layer_fields}
        if self.kv_cache_dtype != AUTO:
            others["quant_config"] = QuantConfig(self.kv_cache_dtype)
        return self.backend.for_heads(layer, shape, sinks, **others)

    def metadata(self, **fields: Any) -> AttentionMetadata:
        """Metadata of one step, from the predefined fields; not yet prepared."""
        return self.backend.Metadata(**fields, **self._metadata_fields)

    def graph_metadata(
        self, cache: KvBuffer, positions: Tensor, inputs: StaticInputs
    ) -> AttentionMetadata:
        """Metadata of a step that is captured once and replayed with other values in `positions`
        and `inputs`."""
        size = len(positions)
        metadata = self.metadata(
            num_contexts=0,
            num_generations=size,
            num_tokens=size,
            num_ctx_tokens=0,
            seq_lens=torch.ones(size, dtype=torch.int64),
            kv_cache_params=KvCacheParams(use_cache=True),
            kv_cache_manager=cache,
            position_ids=positions,
            max_num_requests=size,
            max_num_tokens=size,
        )
        return metadata.create_cuda_graph_metadata(inputs)

    def pass_metadata(self, positions: Tensor) -> AttentionMetadata:
        """Metadata of a pass without a cache, of one context."""
        size = len(positions)
        metadata = self.metadata(
            num_contexts=1,
            num_generations=0,
            num_tokens=size,
            num_ctx_tokens=size,
            seq_lens=torch.tensor([size]),
            kv_cache_params=KvCacheParams(use_cache=False),
            position_ids=positions,
            max_num_requests=1,
            max_num_tokens=size,
        )
        metadata.prepare()
        return metadata

    def idle_metadata(self, cache: KvBuffer, positions: Tensor) -> AttentionMetadata:
        """Metadata of a step that leaves the cache as it is: a context of all `positions` but the
        last, if there are several, and a generation. Contexts may read the arena's first block,
        whatever is in it."""
        num_ctx_tokens = len(positions) - 1
        lens = [num_ctx_tokens, 1] if num_ctx_tokens else [1]
        blocks = [0] * -(-len(positions) // cache.tokens_per_block)
        metadata = self.metadata(
            num_contexts=len(lens) - 1,
            num_generations=1,
            num_tokens=len(positions),
            num_ctx_tokens=num_ctx_tokens,
            seq_lens=torch.tensor(lens),
            kv_cache_params=KvCacheParams(
                use_cache=True,
                num_cached_tokens_per_seq=(0,) * len(lens),
                block_tables=([blocks] * len(lens),) * len(cache.windows),
            ),
            kv_cache_manager=cache,
            position_ids=positions,
            max_num_requests=len(lens),
            max_num_tokens=len(positions),
        )
        metadata.prepare_idle()
        return metadata
