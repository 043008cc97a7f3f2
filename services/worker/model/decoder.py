"""The decoder that all families share: embedding, layers, head. Families fill in a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from loraplex.api.output import RoutingShape
from loraplex_services.worker.layers.attention import query_scales
from loraplex_services.worker.layers.embedding import LoraEmbedding
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.ranks import GatheredLinear
from loraplex_services.worker.layers.ropes import Ropes
from loraplex_services.worker.layers.score import ScoreHead
from loraplex_services.worker.ops.linear.torch import ChoosesBest, WeightRows, keeps_float32
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.norm.torch import Norm
from loraplex_services.worker.ops.rope.torch import CosSin
from loraplex_services.worker.transfers import to_device
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.sharding import ONLY, Shard
from loraplex_services.worker.types.sites import EXPERT, LINEAR, LM_HEAD, SiteTable

if TYPE_CHECKING:
    from loraplex_services.worker.model.draft_head import DraftHead

_NO_ADAPTERS = LoraBatch((), {})


class Mlp(Protocol):
    """Dense or sparse MLP."""

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        ...


class Mixer(Protocol):
    """Attention, or the recurrent operator of layers without attention."""

    def forward(self, x: Tensor, cos_sin: CosSin, batch: ForwardBatch) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        ...


class Layer(Protocol):
    """One step of the residual stream."""

    def forward(
        self, x: Tensor, update: Tensor | None, cos_sin: CosSin, batch: ForwardBatch
    ) -> Tensor | None:
        """Run the layer. Mutates: x.

        Args:
            x: `[T, H]`, the residual stream, to which `update` is added.
            update: `[T, H]`, what the layer before left to be added; None = nothing.

        Returns:
            `[T, H]`, what is left to be added to `x`; None = nothing.
        """
        ...


LayersPass = Callable[[Tensor, Sequence[CosSin], ForwardBatch], Tensor]
"""See `Decoder.forward_layers`."""


class LayerInputs(Protocol):
    """The inputs of layers in addition to the residual stream."""

    def forward(self, token_ids: Tensor, embedded: Tensor, lora: LoraBatch) -> Tensor:
        """int64 `[T]` and `[T, H]` -> `[T, layers, width]`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Attention or recurrence, and MLP, each normalised before and, in some families, after."""

    mixer: Mixer
    mlp: Mlp
    norms: tuple[Norm, Norm]
    post_norms: tuple[Norm, Norm] | None

    def forward(
        self, x: Tensor, update: Tensor | None, cos_sin: CosSin, batch: ForwardBatch
    ) -> Tensor:
        """Run the layer; returns what its MLP adds to the residual stream, `[T, H]`.

        Args:
            x: `[T, H]`, the residual stream. Mutated: `update`, then the attention's, is added.
            update: what the layer before adds; None before the first.
        """
        return self.transform(x, self.mix(x, update, cos_sin, batch), batch)

    def mix(self, x: Tensor, update: Tensor | None, cos_sin: CosSin, batch: ForwardBatch) -> Tensor:
        """The first half: what the mixer adds. Mutates x as `forward` does."""
        normed = self.norms[0].forward(x, batch.lora, update)
        update = self.mixer.forward(normed, cos_sin, batch)
        if self.post_norms is not None:
            update = self.post_norms[0].forward(update, batch.lora)
        return update

    def transform(self, x: Tensor, update: Tensor, batch: ForwardBatch) -> Tensor:
        """The second half, in which each row is on its own: what the MLP adds. Mutates x."""
        update = self.mlp.forward(self.norms[1].forward(x, batch.lora, update), batch)
        if self.post_norms is not None:
            update = self.post_norms[1].forward(update, batch.lora)
        return update


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """The site table, and the base's weights at each site."""

    table: SiteTable
    linears: Mapping[int, WeightRows]
    """Weights by site id; none for norms. That of the embedding is its table, whose rows are
    tokens."""
    biases: Mapping[int, Tensor]
    """Biases by site id, if the base has any."""
    norm_offsets: Mapping[int, float]
    """The offset that is added to a norm's weight, including a trained one, by site id; 0 if
    absent."""
    shard: Shard = ONLY
    """Which part of each site the layers have. `table` and `linears` describe complete sites."""
    published: Mapping[int, WeightRows] = field(default_factory=dict)
    """The published weight by site id, if it was quantised on load."""

    @property
    def own_table(self) -> SiteTable:
        """The sites as the layers have them."""
        return self.table.on_rank(self.shard)


class Decoder:
    """A causal language model over a paged cache."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: LoraEmbedding,
        layers: Sequence[Layer],
        norm: Norm | None,
        head: LoraLinear,
        score: ScoreHead,
        site_weights: SiteWeights,
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        self.config = config
        self.site_weights = site_weights
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._score = score
        self._layer_inputs = layer_inputs
        self._query_scales = query_scales(config, embedding.weight.device)
        self.ropes = Ropes(config.ropes, embedding.weight.device)
        self.pass_layers: LayersPass = self.forward_layers
        """The function that computes the layers: `forward_layers`, or one with the same results."""
        self.draft_head: DraftHead | None = None
        """The draft head, if the files have one and it is wanted."""

    @property
    def cached_config(self) -> ModelConfig:
        """The configuration with all layers that keep keys and values."""
        return self.config if self.draft_head is None else self.draft_head.config

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights of this rank's products in the dtype that they compute in; the head
        counts even when it is tied."""
        sites = self.site_weights.own_table.sites
        products = [site for site in sites if site.kind in (LINEAR, LM_HEAD)]
        num_items = sum(site.in_features * site.out_features for site in products)
        return num_items * self._embedding.dtype.itemsize

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[T, H]` after the last norm."""
        batch.attention.begin_forward()
        x = self._embedding.forward(batch.input_ids, batch.lora)
        if self.config.embed_scale != 1.0:
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype)
        if self._layer_inputs is not None:
            inputs = self._layer_inputs.forward(batch.input_ids, x, batch.lora)
            batch = replace(batch, layer_inputs=inputs)
        if self._query_scales is not None:
            factors = self._query_scales[batch.positions].to(x.dtype)
            batch = replace(batch, query_scales=factors)
        rotations = self.ropes.by_layer(batch.positions, x.dtype, batch.rope_rows)
        hidden = self.pass_layers(x, rotations, batch)
        batch.shared_kv.clear()  # captured steps keep their batch
        return hidden

    def forward_layers(self, x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch) -> Tensor:
        """All layers and the last norm.

        Args:
            x: `[T, H]`, what the first layer reads. Mutated.
            rotations: by layer.

        Returns: fresh `[T, H]`. Rows that nothing reads may be zeros.
        """
        if self.skips_rows(batch):
            return self.end_of_rows(x, self.forward_mixers(x, rotations, batch), batch)
        assert self._norm is not None, "subclasses without one have a pass of their own"
        update = self._before_last(x, rotations, batch)
        update = self._layers[-1].forward(x, update, rotations[-1], batch)
        return self._norm.forward(x, batch.lora, update)

    def skips_rows(self, batch: ForwardBatch) -> bool:
        """Whether the part of `forward_layers` after the last mixer computes some rows only."""
        has_halves = isinstance(self._layers[-1], DecoderLayer)
        return batch.read_rows is not None and has_halves and self.draft_head is None

    def forward_mixers(self, x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch) -> Tensor:
        """The part of `forward_layers` up to the last mixer: what that adds, `[T, H]`, to x, which
        is mutated."""
        update = self._before_last(x, rotations, batch)
        last = self._layers[-1]
        assert isinstance(last, DecoderLayer), type(last)
        return last.mix(x, update, rotations[-1], batch)

    def end_of_rows(self, x: Tensor, update: Tensor, batch: ForwardBatch) -> Tensor:
        """The rest, for `read_rows` only; takes what `forward_mixers` leaves."""
        rows, last = batch.read_rows, self._layers[-1]
        assert self._norm is not None and rows is not None and isinstance(last, DecoderLayer)
        own = replace(batch, lora=batch.lora.select(rows.tolist()))
        own_x, own_update = x.index_select(0, rows), update.index_select(0, rows)
        hidden = self._norm.forward(own_x, own.lora, last.transform(own_x, own_update, own))
        return torch.zeros_like(x).index_copy_(0, rows, hidden)

    def _before_last(
        self, x: Tensor, rotations: Sequence[CosSin], batch: ForwardBatch
    ) -> Tensor | None:
        """All layers but the last one: see `Layer.forward`."""
        batch.attention.rotations = rotations
        update = None
        for layer, cos_sin in zip(self._layers[:-1], rotations[:-1], strict=True):
            update = layer.forward(x, update, cos_sin, batch)
        return update

    def draft_hidden(self, hidden: Tensor, next_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states of the draft head `[T, H]`, given those of `forward` and the token after
        each position, int64 `[T]`."""
        assert self.draft_head is not None
        ids = next_ids.clamp(max=self.config.vocab_size - 1)  # adapters may have more tokens
        embedded = self._embedding.forward(ids, _NO_ADAPTERS)
        rotation = self.ropes.by_layer(batch.positions, hidden.dtype, None)[0]
        batch = replace(batch, lora=_NO_ADAPTERS, routing=None)
        return self.draft_head.forward(embedded, hidden, rotation, batch)

    def proposals(self, hidden: Tensor) -> Tensor:
        """The likeliest token, int64 `[n]`, after each of some rows of `draft_hidden`."""
        width = self._head.base.out_features
        return self._base_logits(hidden, _NO_ADAPTERS, width).argmax(dim=-1)

    @property
    def proposal_cost(self) -> float:
        """Bytes of weights that `proposals` reads, over those of a step of one token; 0 = nothing
        proposes."""
        if self.draft_head is None:
            return 0.0
        num_items = self._head.base.out_features * self._head.base.in_features
        share = num_items * self._embedding.dtype.itemsize / self.weight_bytes
        return share * (1 - self.expert_share)

    @property
    def expert_share(self) -> float:
        """The share of routed experts in the weights that a step of one token reads."""
        moe = self.config.moe
        if moe is None:
            return 0.0
        sites = [site for site in self.site_weights.own_table.sites if site.kind == EXPERT]
        num_items = sum(site.in_features * site.out_features for site in sites)
        active = num_items * self.active_experts * self._embedding.dtype.itemsize
        return active / (active + self.weight_bytes)

    @property
    def active_experts(self) -> float:
        """The share of a layer's experts that compute one token."""
        moe = self.config.moe
        return 1.0 if moe is None else moe.num_active / moe.num_experts

    @property
    def routing(self) -> RoutingShape | None:
        """The experts that layers choose for a token; None = they have no experts."""
        moe = self.config.moe
        if moe is None:
            return None
        return RoutingShape(self.config.num_layers, moe.num_active, 1 + (moe.num_experts > 256))

    def scores(self, hidden: Tensor, lora: LoraBatch) -> list[Tensor]:
        """Logits of each row's adapter's own head: see `ScoreHead`."""
        return self._score.forward(hidden, lora)

    def add_to_logits(self, hidden: Tensor) -> None:
        """Compute this rank's columns of the logits, for `logits` on rank 0."""
        base = self._head.base
        if keeps_float32(hidden):
            base.apply_float32(hidden)
        else:
            base.apply(hidden)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Fresh logits of the base, float32 `[n, own]`: this rank's columns, which are those of
        `Shard.vocabulary`."""
        head = self._head.base
        assert isinstance(head, GatheredLinear), "only ranks have columns of their own"
        return self._capped(head.own_columns(hidden))

    def rows_with_heads(self, lora: LoraBatch) -> list[tuple[int, int]]:
        """Token rows [begin, end) whose adapters change the head. Only rank 0 has their values."""
        table, site_id = lora.table, self._head.site_id
        runs = [run for run in lora.runs if table.get((run.slot, site_id)) is not None]
        return [(run.begin, run.end) for run in runs]

    def _base_logits(self, hidden: Tensor, lora: LoraBatch, width: int) -> Tensor:
        """Float32 `[n, width]`, with columns beyond the base's where adapters have more tokens."""
        return self._capped(self._head.forward_float32(hidden, lora, width))

    def _capped(self, logits: Tensor) -> Tensor:
        softcap = self.config.logit_softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    @cached_property
    def finds_best(self) -> bool:
        """Whether the base's best tokens can be found without storing logits."""
        has_cap = self.config.logit_softcap is not None
        return isinstance(self._head.base, ChoosesBest) and not has_cap

    def best_tokens(self, hidden: Tensor, lora: LoraBatch) -> Tensor | None:
        """The first largest of `logits`, int64 `[n]`, where `finds_best`; None if an adapter of
        these rows changes the head."""
        base = self._head.base
        assert isinstance(base, ChoosesBest), type(base)
        return None if self.rows_with_heads(lora) else base.best(hidden)

    def logits(self, hidden: Tensor, lora: LoraBatch) -> Tensor:
        """Fresh logits, float32 `[n, V]`, of hidden rows `[n, H]`; `lora` runs over these rows.

        V is the base's vocabulary size, or the largest to which an adapter of these rows resizes
        it. The logits of tokens that a row's own adapter lacks are -inf.
        """
        resized = lora.resized(self._head.site_id)
        num_own = self._head.base.out_features
        width = max([num_own, *(num_rows for _, _, num_rows in resized)])
        logits = self._base_logits(hidden, lora, width)
        if resized:
            limits = torch.full((len(logits), 1), num_own)
            for begin, end, num_rows in resized:
                limits[begin:end] = num_rows
            beyond = torch.arange(width, device=logits.device) >= to_device(limits, logits.device)
            logits.masked_fill_(beyond, -math.inf)
        return logits
