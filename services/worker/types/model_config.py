"""The configuration of a base model; `model.config_reader` reads it from a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer."""

    dim: int
    """Number of leading components of a head that are rotated."""
    theta: float
    kind: str = "default"
    """default, linear, dynamic, llama3, yarn, longrope or proportional."""
    params: tuple[tuple[str, Any], ...] = ()
    """Numbers of the scaling method, sorted by name."""

    @property
    def switch_len(self) -> int | None:
        """Sequences of more tokens than this are rotated differently, from their first token on."""
        if self.kind != "longrope":
            return None
        return int(dict(self.params)["original_max_position_embeddings"])


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries grow with the position by the factor 1 + beta log(1 + floor(position /
    context_len))."""

    beta: float
    context_len: int


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit` and up within +-`limit`. They
    are the even and the odd outputs of one projection."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sparse MLP of a mixture of experts."""

    num_experts: int
    num_active: int
    intermediate_size: int
    renormalise: bool
    """Scale the chosen experts' router weights so that they sum to 1."""
    shared_intermediate_size: int | None = None
    """Width of the expert that every token visits, if there is one."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a plain MLP."""
    swiglu: ClampedSwiglu | None = None
    """Activation of the experts; None = the model's."""


@dataclass(frozen=True, slots=True)
class RecurrenceConfig:
    """Gated delta nets, which some layers have instead of attention: see `ops/recurrence`."""

    layers: tuple[int, ...]
    """Layers without attention, ascending."""
    num_key_heads: int
    num_value_heads: int
    """Number of value heads, a multiple of the key heads."""
    key_dim: int
    """Width of one head's keys."""
    value_dim: int
    kernel_size: int
    """Number of tokens that the convolution sees: the current one and those before it."""

    @property
    def keys_size(self) -> int:
        """Width of all key heads, and of all query heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_size + self.values_size


@dataclass(frozen=True, slots=True)
class KvHeads:
    """The key heads of one layer; it has as many value heads."""

    count: int
    dim: int
    """Width of each of them, and of each query head of the layer."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and arithmetic of a decoder, every default resolved."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position_embeddings: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None = full attention, or none."""
    ropes: tuple[RopeConfig, ...]
    """Rotary embedding of each layer; empty if the transformers library rotates."""
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Normalise each query and key head before it is rotated."""
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma stores weight - 1)."""
    norm_in_float32: bool = False
    """Multiply by the norm weight before rounding to the model's dtype, not after."""
    embed_scale: float = 1.0
    chunked: tuple[bool, ...] = ()
    """Whether the window of each layer begins at a multiple of its size; empty = none does."""
    query_scale: QueryScale | None = None
    attention_sinks: bool = False
    """Whether each query head has one score more than it has keys, without a value."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    moe: MoeConfig | None = None
    gated_attention: bool = False
    """Whether each query head has a gate, whose sigmoid multiplies the head's output."""
    recurrence: RecurrenceConfig | None = None
    """Gated delta nets of some layers; None = every layer has attention."""
    own_kv_heads: tuple[KvHeads, ...] = ()
    """The key heads of each layer, where layers differ; empty = all have `num_kv_heads` of
    `head_dim`."""
    kv_sources: tuple[int, ...] = ()
    """The layer whose keys and values each layer reads; empty = each has its own."""
    keys_are_values: tuple[bool, ...] = ()
    """Whether each layer makes values from the same projection as keys."""
    wide_mlps: tuple[int, ...] = ()
    """Layers whose MLP has twice the width."""
    layer_input_size: int = 0
    """Width of the per-layer inputs of each token, in addition to the residual stream; 0 = none."""
    num_layer_input_rows: int = 0
    """Number of tokens in the table of per-layer inputs."""

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers without attention."""
        return () if self.recurrence is None else self.recurrence.layers

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def rope_switch_len(self) -> int | None:
        """See `RopeConfig.switch_len`; all layers with such a method have the same one."""
        return next((rope.switch_len for rope in self.ropes if rope.switch_len is not None), None)

    @property
    def kv_heads(self) -> tuple[KvHeads, ...]:
        """The key heads of each layer."""
        return self.own_kv_heads or (KvHeads(self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def layers_without_kv(self) -> tuple[int, ...]:
        """Layers that keep no keys and values: they have a state, or read those of another
        layer."""
        readers = (layer for layer, source in enumerate(self.kv_sources) if layer != source)
        return (*self.recurrent_layers, *readers)

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim
