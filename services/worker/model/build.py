"""Builds a Decoder from a ModelConfig and named weights; fuses projections that share an input."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.layers.attention import SelfAttention
from loraplex_services.worker.layers.embedding import LoraEmbedding, TokenTable
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.mlp import GatedMlp
from loraplex_services.worker.layers.operators import AddLora, Operators
from loraplex_services.worker.layers.ranks import GatheredLinear
from loraplex_services.worker.layers.score import ScoreHead
from loraplex_services.worker.layers.sharded_lora import ShardedLora
from loraplex_services.worker.model.decoder import (
    Decoder,
    DecoderLayer,
    Layer,
    LayerInputs,
    Mixer,
    Mlp,
    SiteWeights,
)
from loraplex_services.worker.model.load import Weights, parts_of, take_rows
from loraplex_services.worker.model.shard_weights import ShardWeights
from loraplex_services.worker.ops.activation.torch import Activation
from loraplex_services.worker.ops.linear.coded import CodedWeight, joined
from loraplex_services.worker.ops.linear.stacked import StackedLinear
from loraplex_services.worker.ops.linear.torch import BaseLinear, DenseLinear, WeightRows
from loraplex_services.worker.ops.lora.torch import add_lora
from loraplex_services.worker.ops.norm.torch import Norm, NormWeight
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.sharding import (
    WHOLE,
    Cut,
    Shard,
    local_config,
)
from loraplex_services.worker.types.sites import (
    EMBEDDING,
    EXPERT,
    HEAD,
    LINEAR,
    LM_HEAD,
    NORM,
    SiteTableBuilder,
)

logger = logging.getLogger(__name__)

Modules = Sequence[tuple[str, int]]
"""(Hugging Face name, out_features) of projections that share an input."""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The prefix of a decoder layer by its number, and names inside, where families differ."""

    layer: str = "model.layers.{}"
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
    linears: dict[int, WeightRows] = field(default_factory=dict)
    """This and the next three: see `SiteWeights`."""
    biases: dict[int, Tensor] = field(default_factory=dict)
    norm_offsets: dict[int, float] = field(default_factory=dict)
    published: dict[int, WeightRows] = field(default_factory=dict)
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    """Where the weights are; set before the layers are built."""
    _codes: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """Linears by their scheme and by whether their products read codes."""

    def build(
        self,
        make_mlp: Callable[[Builder, int], Mlp] | None = None,
        make_mixer: Callable[[Builder, int], Mixer] | None = None,
        *,
        make_layer: Callable[[Builder, int], Layer] | None = None,
        layer_inputs: LayerInputs | None = None,
    ) -> Decoder:
        """Build the model.

        Args:
            make_mlp: builds the MLP of a layer; None = all have a dense one.
            make_mixer: builds the mixer of a layer; None = all have attention.
            make_layer: builds a layer, in families whose layers are not made of a mixer, an MLP
                and norms.
            layer_inputs: what layers read in addition to the residual stream.

        Raises:
            InvalidRequest: a tensor of the files is missing, has another shape, or is not used.
        """
        config, weights = self.config, self.weights
        table = self._token_rows("model.embed_tokens.weight")
        tokens = TokenTable(table, config.vocab_size, self.operators.ranks, weights.dtype)
        embedding = LoraEmbedding(
            self._embedding_site(table), tokens, self.operators.add_lora_embedding()
        )
        self.device = table.device
        makers = make_mixer or Builder.attention, make_mlp or dense_mlp
        layers: list[Layer] = [
            make_layer(self, i) if make_layer else self._layer(i, *makers)
            for i in range(config.num_layers)
        ]
        norm = self.norm(-1, "model.norm", config.hidden_size)
        head = self._head(table)
        score = ScoreHead(self.sites.add(-1, HEAD, config.hidden_size, [("score", 0)]))
        weights.finish()
        for (scheme, is_kept), count in sorted(self._codes.items()):
            how = "kept in codes" if is_kept else "dequantised, as no kernel here reads them"
            logger.info("quantised weights: %d linears of %s are %s", count, scheme, how)
        facts = self.biases, self.norm_offsets, self.shard, self.published
        sites = SiteWeights(self.sites.build(), self.linears, *facts)
        return Decoder(config, embedding, layers, norm, head, score, sites, layer_inputs)

    @property
    def shard(self) -> Shard:
        """The part of the base that is built."""
        return self.operators.ranks.shard

    @property
    def own(self) -> ShardWeights:
        """This rank's part of the weights."""
        return ShardWeights(self.weights, self.shard, self.operators.keeps_half)

    def _token_rows(self, name: str) -> Tensor:
        return self.own.token_rows(name, self.config.vocab_size, self.config.hidden_size)

    def _embedding_site(self, table: Tensor) -> int:
        vocab_size, width = self.config.vocab_size, self.config.hidden_size
        site_id = self.sites.add(-1, EMBEDDING, vocab_size, [("model.embed_tokens", width)])
        parts = [("model.embed_tokens", vocab_size)]
        self.linears[site_id] = self._rows_of(DenseLinear(table), parts, width)
        return site_id

    def _rows_of(self, own: BaseLinear, modules: Modules, num_inputs: int) -> WeightRows:
        """Where packing reads complete rows of a weight. A rank that has a part of it reads them
        from the files again."""
        if self.shard.size == 1:
            return own
        parts = [(f"{name}.weight", rows) for name, rows in modules]
        return self.weights.rows_in_files(parts, num_inputs)

    def norm(self, layer: int, name: str, width: int, *, is_plain: bool = False) -> Norm:
        """A norm by name; a plain one has no offset and rounds first, whatever the others do."""
        config = self.config
        weight = self.weights.take(f"{name}.weight", (width,))
        site_id = self.sites.add(layer, NORM, width, [(name, width)])
        offset = 0.0 if is_plain else config.norm_offset
        self.norm_offsets[site_id] = offset
        in_float32 = config.norm_in_float32 and not is_plain
        return self.operators.norm(site_id, NormWeight(weight, config.norm_eps, offset, in_float32))

    def linear(
        self,
        layer: int,
        num_inputs: int,
        modules: Modules,
        has_bias: bool,
        cut: Cut = WHOLE,
        *,
        is_addend: bool = False,
        activation: Activation | None = None,
    ) -> LoraLinear:
        """A site of stacked projections.

        Args:
            num_inputs: inputs of the complete weight, whose outputs `modules` has.
            cut: how ranks divide it.
            is_addend: if ranks divide the inputs, leave the sum over the ranks to the caller.
            activation: of the gates, if the projections are gates and what they multiply.
        """
        base = self.base(modules, num_inputs, cut, activation)
        both = self.operators.division.divides_both(num_inputs, [n for _, n in modules], cut)
        site_id = self.sites.add(layer, LINEAR, num_inputs, modules, cut, divides_both=both)
        self.linears[site_id] = self._rows_of(base, modules, num_inputs)
        bias = None
        if has_bias:
            bias = take_rows(self.weights, [(f"{m}.bias", rows) for m, rows in modules])
            self.biases[site_id] = bias
            if spans := self.shard.spans(cut.outputs):
                bias = torch.cat([bias[begin:end] for begin, end in spans])
        is_summed = bool(cut.inputs) and self.shard.size > 1 and not is_addend
        assert not (is_addend and has_bias), "each rank would add the bias"
        sum_ranks = self.operators.ranks.all_reduce if is_summed else None
        return LoraLinear(site_id, base, bias, self._add_lora(cut, both), sum_ranks)

    def keeps_expert_codes(self, modules: Modules, num_inputs: int) -> bool:
        """Whether experts' products read the codes that the files have of these weights."""
        name, rows = modules[0]
        codes = self.weights.take_codes(f"{name}.weight", (rows, num_inputs))
        return codes is not None and self.operators.reads_expert_codes(codes)

    def base(
        self, modules: Modules, num_inputs: int, cut: Cut, activation: Activation | None = None
    ) -> BaseLinear:
        """The stacked weights of `modules`, in codes where the files have codes that a kernel
        reads."""
        window = self.own.window(sum(rows for _, rows in modules), cut)
        names = parts_of([(f"{name}.weight", rows) for name, rows in modules], window)
        found = [self.own.codes(name, (rows, num_inputs), own) for name, rows, own in names]
        codes = [part for part in found if part is not None]
        if not codes:
            return self.operators.linear(self.weight(modules, num_inputs, cut), activation)
        if len(codes) == len(found) and (stack := joined(codes)) is not None:
            return self._coded_linear(stack, len(codes), activation)
        parts = [
            self.operators.linear(self.weights.take(name, (rows, num_inputs), own))
            if part is None
            else self._coded_linear(part)
            for part, (name, rows, own) in zip(found, names, strict=True)
        ]
        return StackedLinear(parts)

    def _coded_linear(
        self, weight: CodedWeight, num_modules: int = 1, activation: Activation | None = None
    ) -> BaseLinear:
        key = weight.scheme, self.operators.reads_codes(weight)
        self._codes[key] += num_modules
        return self.operators.coded_linear(weight, self.weights.dtype, activation)

    def _add_lora(self, cut: Cut, divides_both: bool) -> AddLora:
        if not divides_both:
            return self.operators.add_lora()
        return ShardedLora(self.operators.ranks, is_cut_by_outputs=bool(cut.outputs))

    def weight(self, modules: Modules, num_inputs: int, cut: Cut) -> Tensor:
        """The stacked weights `[out, in]` of `modules`, or the part that this rank has."""
        return self.own.stacked(
            [(f"{name}.weight", rows) for name, rows in modules], num_inputs, cut
        )

    def expert_linear(
        self,
        layer: int,
        num_inputs: int,
        modules: Modules,
        base: BaseLinear,
        cut: Cut,
        bias: Tensor | None = None,
    ) -> LoraLinear:
        """A site of one expert. Plain torch computes its adapters on every device, because the
        number of its rows changes with each step."""
        site_id = self.sites.add(layer, EXPERT, num_inputs, modules, cut)
        self.linears[site_id] = self._rows_of(base, modules, num_inputs)
        if bias is not None:
            self.biases[site_id] = bias
            bias = self.own.bias(bias, cut)
        return LoraLinear(site_id, base, bias, add_lora)

    def _layer(
        self,
        layer: int,
        make_mixer: Callable[[Builder, int], Mixer],
        make_mlp: Callable[[Builder, int], Mlp],
    ) -> DecoderLayer:
        prefix, names, width = self.names.layer.format(layer), self.names, self.config.hidden_size
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
        return DecoderLayer(make_mixer(self, layer), make_mlp(self, layer), norms, post_norms)

    def attention(self, layer: int) -> SelfAttention:
        """The attention of a layer."""
        config, prefix = self.config, f"{self.names.layer.format(layer)}.self_attn"
        own, q, kv = local_config(config, self.shard), config.q_size, config.kv_size
        q_outputs = 2 * q if config.gated_attention else q
        heads, kv_heads = (q_outputs, config.num_heads), (kv, config.num_kv_heads)
        names = [("q_proj", q_outputs), ("k_proj", kv), ("v_proj", kv)]
        if self.names.fused_qkv:
            names = [("qkv_proj", q + 2 * kv)]
        modules = [(f"{prefix}.{name}", width) for name, width in names]
        head_norms = None
        if config.qk_norm:
            head_norms = (
                self.norm(layer, f"{prefix}.q_norm", config.head_dim),
                self.norm(layer, f"{prefix}.k_norm", config.head_dim),
            )
        sinks = None
        if config.attention_sinks:
            by_heads = self.own.window(config.num_heads, Cut(outputs=((config.num_heads,) * 2,)))
            sinks = self.weights.take(
                f"{prefix}.sinks", (config.num_heads,), by_heads, dtype=torch.float32
            )
        return SelfAttention(
            qkv=self.linear(
                layer,
                config.hidden_size,
                modules,
                config.qkv_bias,
                Cut(outputs=(heads, kv_heads, kv_heads)),
            ),
            o=self.linear(
                layer,
                q,
                [(f"{prefix}.o_proj", config.hidden_size)],
                config.o_bias,
                Cut(inputs=((q, config.num_heads),)),
            ),
            backend=self.operators.attention_maker.layer(own, layer, sinks),
            head_norms=head_norms,
            rotate=self.operators.rotate,
            scales_queries=config.query_scale is not None,
            gated=self.operators.gated("sigmoid") if config.gated_attention else None,
        )

    def _head(self, embedding: Tensor) -> LoraLinear:
        is_tied = self.config.tied_embeddings
        name, table = ("model.embed_tokens", embedding) if is_tied else ("lm_head", None)
        if is_tied and self.weights.has("lm_head.weight"):
            saved = self._token_rows("lm_head.weight")
            if not (saved == embedding).all():  # their types may differ
                description = "differs from the embedding, but tie_word_embeddings is true"
                raise InvalidRequest.field("lm_head.weight", "present", description)
        vocab_size, width = self.config.vocab_size, self.config.hidden_size
        site_id = self.sites.add(-1, LM_HEAD, width, [("lm_head", vocab_size)])
        base = self._head_base(site_id, name, table)
        if site_id in self.published:  # a tied head was quantised, and the table was not
            name = "lm_head"
        self.linears[site_id] = self._rows_of(base, [(name, vocab_size)], width)
        if self.shard.size > 1:  # what adapters add to the head is computed on rank 0
            base = GatheredLinear(base, vocab_size, self.operators.ranks)
        return LoraLinear(site_id, base, None, self.operators.add_lora())

    def _head_base(self, site_id: int, name: str, table: Tensor | None) -> BaseLinear:
        """The head's product; `table` is its weight if the head is tied to the embedding."""
        shape = self.config.vocab_size, self.config.hidden_size
        if (codes := self.weights.take_codes(f"{name}.weight", shape)) is not None:
            if codes.published is not None:
                self.published[site_id] = codes.published
            return self._coded_linear(self.own.token_codes(codes))
        if table is None:
            table = self._token_rows(f"{name}.weight")
        return self.operators.head(table)


def dense_mlp(builder: Builder, layer: int) -> GatedMlp:
    """The plain MLP of a layer."""
    prefix = f"{builder.names.layer.format(layer)}.mlp"
    return gated_mlp(builder, layer, prefix, builder.config.intermediate_size)


def gated_mlp(
    builder: Builder, layer: int, prefix: str, width: int, *, is_addend: bool = False
) -> GatedMlp:
    """gate, up and down projections under a prefix; `is_addend`: see `Builder.linear`."""
    config, hidden = builder.config, builder.config.hidden_size
    has_bias, outputs, inputs = config.mlp_bias, inner_outputs(width), inner_inputs(width)
    activation = config.activation
    gate_up = [(f"{prefix}.gate_proj", width), (f"{prefix}.up_proj", width)]
    if builder.names.fused_qkv:
        gate_up = [(f"{prefix}.gate_up_proj", 2 * width)]
    down = [(f"{prefix}.down_proj", hidden)]
    return GatedMlp(
        builder.linear(layer, hidden, gate_up, has_bias, outputs, activation=activation),
        builder.linear(layer, width, down, has_bias, inputs, is_addend=is_addend),
        builder.operators.gate(activation),
    )


def inner_outputs(width: int) -> Cut:
    """How ranks divide stacked gate and up projections: by neurons."""
    return Cut(outputs=((width, width), (width, width)))


def inner_inputs(width: int) -> Cut:
    """How ranks divide a down projection."""
    return Cut(inputs=((width, width),))
