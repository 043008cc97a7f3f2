"""Builds a Decoder from a ModelConfig and named weights; fuses projections that share an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.layers.attention import SelfAttention
from loraplex_services.worker.layers.embedding import LoraEmbedding
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.mlp import GatedMlp
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.layers.score import ScoreHead
from loraplex_services.worker.model.decoder import Decoder, DecoderLayer, Mlp, SiteWeights
from loraplex_services.worker.model.load import Weights, take_rows
from loraplex_services.worker.ops.linear.torch import BaseLinear, DenseLinear
from loraplex_services.worker.ops.lora.torch import add_lora
from loraplex_services.worker.ops.norm.torch import Norm, NormWeight
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.sites import (
    EMBEDDING,
    EXPERT,
    HEAD,
    LINEAR,
    LM_HEAD,
    NORM,
    SiteTableBuilder,
)

Modules = Sequence[tuple[str, int]]
"""(Hugging Face name, out_features) of projections that share an input."""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names inside a decoder layer, where families differ."""

    input_norm: str = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    fused_qkv: bool = False
    """The files hold one `qkv_proj` and one `gate_up_proj`."""


@dataclass(slots=True)
class Builder:
    """Takes weights in model order and collects sites."""

    config: ModelConfig
    weights: Weights
    operators: Operators
    names: LayerNames = field(default_factory=LayerNames)
    sites: SiteTableBuilder = field(default_factory=SiteTableBuilder)
    linears: dict[int, BaseLinear] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)
    _query_scales: Tensor | None = None

    def build(self, make_mlp: Callable[[Builder, int], Mlp] | None = None) -> Decoder:
        """The whole model. Every tensor of the files must be used."""
        config, weights = self.config, self.weights
        shape = (config.vocab_size, config.hidden_size)
        table = weights.take("model.embed_tokens.weight", shape)
        embedding = LoraEmbedding(self._embedding_site(table), table)
        self._query_scales = query_scales(config, table.device)
        layers = [self._layer(i, make_mlp or dense_mlp) for i in range(config.num_layers)]
        norm = self.norm(-1, "model.norm", config.hidden_size)
        head = self._head(table)
        score = ScoreHead(self.sites.add(-1, HEAD, config.hidden_size, [("score", 0)]))
        weights.finish()
        sites = SiteWeights(self.sites.build(), self.linears, self.biases, config.norm_offset)
        return Decoder(config, embedding, layers, norm, head, score, sites)

    def _embedding_site(self, table: Tensor) -> int:
        vocab_size, width = table.shape
        site_id = self.sites.add(-1, EMBEDDING, vocab_size, [("model.embed_tokens", width)])
        self.linears[site_id] = DenseLinear(table)
        return site_id

    def norm(self, layer: int, name: str, width: int) -> Norm:
        """A norm by name."""
        config = self.config
        weight = self.weights.take(f"{name}.weight", (width,))
        site_id = self.sites.add(layer, NORM, width, [(name, width)])
        return self.operators.norm(
            site_id,
            NormWeight(weight, config.norm_eps, config.norm_offset, config.norm_in_float32),
        )

    def linear(self, layer: int, num_inputs: int, modules: Modules, has_bias: bool) -> LoraLinear:
        """A site of stacked projections."""
        weight = take_rows(self.weights, [(f"{m}.weight", rows) for m, rows in modules], num_inputs)
        bias = None
        if has_bias:
            bias = take_rows(self.weights, [(f"{m}.bias", rows) for m, rows in modules])
        return self._site(layer, LINEAR, modules, weight, bias)

    def expert_linear(self, layer: int, modules: Modules, weight: Tensor) -> LoraLinear:
        """A site of one expert. Plain torch on every device: its rows come and go."""
        site_id = self.sites.add(layer, EXPERT, weight.shape[1], modules)
        self.linears[site_id] = DenseLinear(weight)
        return LoraLinear(site_id, self.linears[site_id], None, add_lora)

    def _site(
        self, layer: int, kind: str, modules: Modules, weight: Tensor, bias: Tensor | None
    ) -> LoraLinear:
        base = self.operators.linear(weight)
        site_id = self.sites.add(layer, kind, base.in_features, modules)
        self.linears[site_id] = base
        if bias is not None:
            self.biases[site_id] = bias
        return LoraLinear(site_id, base, bias, self.operators.add_lora())

    def _layer(self, layer: int, make_mlp: Callable[[Builder, int], Mlp]) -> DecoderLayer:
        prefix, names, width = f"model.layers.{layer}", self.names, self.config.hidden_size
        norms = (
            self.norm(layer, f"{prefix}.{names.input_norm}", width),
            self.norm(layer, f"{prefix}.{names.mlp_norm}", width),
        )
        post_norms = None
        if names.attention_post_norm is not None and names.mlp_post_norm is not None:
            post_norms = (
                self.norm(layer, f"{prefix}.{names.attention_post_norm}", width),
                self.norm(layer, f"{prefix}.{names.mlp_post_norm}", width),
            )
        return DecoderLayer(self._attention(layer), make_mlp(self, layer), norms, post_norms)

    def _attention(self, layer: int) -> SelfAttention:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        q, kv = config.q_size, config.kv_size
        split = [(f"{prefix}.q_proj", q), (f"{prefix}.k_proj", kv), (f"{prefix}.v_proj", kv)]
        modules = [(f"{prefix}.qkv_proj", q + 2 * kv)] if self.names.fused_qkv else split
        head_norms = None
        if config.qk_norm:
            head_norms = (
                self.norm(layer, f"{prefix}.q_norm", config.head_dim),
                self.norm(layer, f"{prefix}.k_norm", config.head_dim),
            )
        return SelfAttention(
            qkv=self.linear(layer, config.hidden_size, modules, config.qkv_bias),
            o=self.linear(layer, q, [(f"{prefix}.o_proj", config.hidden_size)], config.o_bias),
            backend=self.operators.attention(config, layer),
            sizes=(q, kv, config.head_dim),
            head_norms=head_norms,
            rotate=self.operators.rotate,
            query_scales=self._query_scales,
        )

    def _head(self, embedding: Tensor) -> LoraLinear:
        shape, weight = embedding.shape, embedding
        if not self.config.tied_embeddings:
            weight = self.weights.take("lm_head.weight", shape)
        elif self.weights.has("lm_head.weight"):
            saved = self.weights.take("lm_head.weight", shape)
            if not saved.equal(embedding):
                description = "differs from the embedding, but tie_word_embeddings is true"
                raise InvalidRequest.field("lm_head.weight", "present", description)
        return self._site(-1, LM_HEAD, [("lm_head", shape[0])], weight, None)


def query_scales(config: ModelConfig, device: torch.device) -> Tensor | None:
    """The factor of the queries at each position, float32 `[positions, 1]`."""
    scale = config.query_scale
    if scale is None:
        return None
    positions = torch.arange(config.max_position_embeddings, device=device)
    num_contexts = (positions // scale.context_len).float()
    return (1 + scale.beta * torch.log1p(num_contexts))[:, None]


def dense_mlp(builder: Builder, layer: int) -> GatedMlp:
    """The plain MLP of a layer."""
    return gated_mlp(builder, layer, f"model.layers.{layer}.mlp", builder.config.intermediate_size)


def gated_mlp(builder: Builder, layer: int, prefix: str, width: int) -> GatedMlp:
    """gate, up and down projections under a prefix."""
    config, hidden = builder.config, builder.config.hidden_size
    gate_up = [(f"{prefix}.gate_proj", width), (f"{prefix}.up_proj", width)]
    if builder.names.fused_qkv:
        gate_up = [(f"{prefix}.gate_up_proj", 2 * width)]
    down = [(f"{prefix}.down_proj", hidden)]
    return GatedMlp(
        builder.linear(layer, hidden, gate_up, config.mlp_bias),
        builder.linear(layer, width, down, config.mlp_bias),
        builder.operators.gate(config.activation),
    )
