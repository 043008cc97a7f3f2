"""Runs a decoder of transformers with LoRA at its linears."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loraplex.adapter_format import experts
from loraplex.adapter_format.text_model import name_in_files
from loraplex.errors import Unsupported
from loraplex_services.worker.layers.embedding import LoraEmbedding, TokenTable
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.library_modules import (
    CurrentPass,
    KnownStates,
    PassPositions,
    SiteEmbedding,
    SiteExperts,
    SiteHead,
    SiteLinear,
    is_conv1d,
    is_product,
)
from loraplex_services.worker.layers.library_routers import SiteRouter
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.moe import Expert, ExpertWeights
from loraplex_services.worker.layers.operators import AddLora, Operators
from loraplex_services.worker.layers.score import ScoreHead
from loraplex_services.worker.model.decoder import Decoder, SiteWeights
from loraplex_services.worker.ops.linear.torch import BaseLinear, DenseLinear
from loraplex_services.worker.ops.lora.torch import add_lora
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.types.model_config import ModelConfig
from loraplex_services.worker.types.sites import (
    EMBEDDING,
    EXPERT,
    HEAD,
    LINEAR,
    LM_HEAD,
    SiteTableBuilder,
)

_LAYER = re.compile(r"\.(\d+)\.", re.ASCII)
_COUNTING = frozenset({"llama4_text"})
"""Model types whose layers take positions from the cache that they are given."""


def body_name(model: Any) -> str:
    """The name of the part of a model that turns tokens into hidden states."""
    table = model.get_input_embeddings()
    name: str = next(n for n, found in model.named_modules() if found is table)
    return name.partition(".")[0]


def _layer_of(name: str) -> int:
    """The layer of a module, the first number in its name; -1 = none."""
    layer = _LAYER.search(name)
    return int(layer[1]) if layer else -1


@dataclass(slots=True)
class LibrarySites:
    """Replaces the modules of a model and collects their sites."""

    model: Any
    config: ModelConfig
    names: Collection[str]
    """The base's modules as its files name them."""
    called: Collection[nn.Module]
    """The linears and experts that a pass calls. Of others, it may read the weight."""
    routers: Collection[nn.Module]
    operators: Operators
    current: CurrentPass
    of_head: CurrentPass = field(default_factory=CurrentPass)
    """A separate pass: the head may run while the next pass begins."""
    table: SiteTableBuilder = field(default_factory=SiteTableBuilder)
    linears: dict[int, BaseLinear] = field(default_factory=dict)
    biases: dict[int, Tensor] = field(default_factory=dict)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = self.model.get_input_embeddings().weight.dtype

    def decoder(self) -> LibraryDecoder:
        """The model with its modules replaced."""
        embedding = self._embedding()
        head = None
        for name, module in list(self.model.named_modules()):
            if module is self.model.get_output_embeddings():
                head, dtype = self._linear(name, module, LM_HEAD), module.weight.dtype
                self.model.set_submodule(name, SiteHead(head, dtype, self.of_head))
            elif module in self.called and is_product(module):
                linear, dtype = self._linear(name, module, LINEAR), module.weight.dtype
                self.model.set_submodule(name, SiteLinear(linear, dtype, self.current))
            elif module in self.called:
                self._experts(name, module)
            elif module in self.routers:
                site_id = self._site(name, DenseLinear(module.weight.data), LINEAR)
                module.forward = SiteRouter(module.forward, site_id, self.current)
        if head is None:
            why = "has no linear head"
            raise Unsupported.field("config.json:model_type", self.config.model_type, why)
        score = ScoreHead(self.table.add(-1, HEAD, self.config.hidden_size, [("score", 0)]))
        weights = SiteWeights(self.table.build(), self.linears, self.biases, {})
        return LibraryDecoder(
            self.config,
            self.model,
            (self.current, self.of_head),
            (embedding, head, score),
            weights,
        )

    def _embedding(self) -> LoraEmbedding:
        module = self.model.get_input_embeddings()
        name = next(name for name, found in self.model.named_modules() if found is module)
        scale = getattr(module, "scalar_embed_scale", None)  # what the library's scaled tables have
        if type(module) is not nn.Embedding and scale is None:
            raise Unsupported.field(name, type(module).__name__, "is not a plain embedding")
        weight = self.operators.table(module.weight.data.clone())
        site_id = self.table.add(-1, EMBEDDING, len(weight), [(name, weight.shape[1])])
        self.linears[site_id] = DenseLinear(weight)
        embedding = LoraEmbedding(
            site_id,
            TokenTable(weight, len(weight), self.operators.ranks, module.weight.dtype),
            self.operators.add_lora_embedding(),
        )
        self.model.set_submodule(name, SiteEmbedding(embedding, scale or 1.0, self.current))
        return embedding

    def _linear(self, name: str, module: Any, kind: str) -> LoraLinear:
        weight = module.weight.data.T.contiguous() if is_conv1d(module) else module.weight.data
        base: BaseLinear = DenseLinear(weight)
        add: AddLora = add_lora
        if weight.dtype == self.dtype:  # kernels read rows and adapters of one type
            base, add = self.operators.linear(weight), self.operators.add_lora()
        site_id = self._site(name, base, kind)
        if module.bias is not None:
            self.biases[site_id] = module.bias.data
        return LoraLinear(site_id, base, self.biases.get(site_id), add)

    def _site(self, name: str, base: BaseLinear, kind: str) -> int:
        number = _layer_of(name) if kind == LINEAR else -1
        module = name_in_files(name, self.names), base.out_features
        site_id = self.table.add(number, kind, base.in_features, [module])
        self.linears[site_id] = base
        return site_id

    def _experts(self, name: str, module: Any) -> None:
        """Give each expert of a layer two sites, if the files have a linear for each of its three
        projections."""
        for own in experts.LINEARS:
            first = name_in_files(f"{name}.0.{own[0]}", self.names)
            if first in self.names:
                break
        else:
            return
        container = first.removesuffix(f".0.{own[0]}")
        weights = ExpertWeights(module.gate_up_proj.data, module.down_proj.data)
        num_experts, hidden, width = weights.down.shape
        own_experts = []
        for i in range(num_experts):
            gate, up, down = (f"{container}.{i}.{part}" for part in own)
            expert = Expert(
                self._expert_linear(weights.gate_up[i], [(gate, width), (up, width)]),
                self._expert_linear(weights.down[i], [(down, hidden)]),
            )
            self.table.alias(f"{container}.{i}.gate_up_proj", expert.gate_up.site_id)
            if own[2] != "down_proj":
                self.table.alias(f"{container}.{i}.down_proj", expert.down.site_id)
            own_experts.append(expert)
        activation = self.model.config.hidden_act
        # Kernels of CPUs take the number of chosen experts from each call.
        mlps = self.operators.experts(weights, 1, activation, own_experts)
        self.model.set_submodule(name, SiteExperts(mlps, self.current))

    def _expert_linear(self, weight: Tensor, modules: Sequence[tuple[str, int]]) -> LoraLinear:
        base = self.operators.expert_linear(weight)
        site_id = self.table.add(_layer_of(modules[0][0]), EXPERT, base.in_features, modules)
        self.linears[site_id] = base
        return LoraLinear(site_id, base, None, add_lora)


class LibraryDecoder(Decoder):
    """A `Decoder` whose layers are the library's."""

    def __init__(
        self,
        config: ModelConfig,
        model: Any,
        passes: tuple[CurrentPass, CurrentPass],
        ends: tuple[LoraEmbedding, LoraLinear, ScoreHead],
        site_weights: SiteWeights,
    ) -> None:
        """See Decoder.

        Args:
            passes: what passes of the body, and of the head, read.
            ends: embedding, head, and the site of adapters' classification heads.
        """
        embedding, head, score = ends
        super().__init__(config, embedding, (), None, head, score, site_weights)
        name = body_name(model)
        self._body = model.get_submodule(name)
        self._states = KnownStates()
        setattr(model, name, self._states)
        self._model = model
        self._current, self._of_head = passes
        is_counting = config.model_type in _COUNTING
        self._cache = PassPositions(self._current) if is_counting else None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Decoder."""
        batch.attention.begin_forward()
        self._current.batch, self._current.lora = batch, batch.lora
        out = self._body(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            past_key_values=self._cache,
            use_cache=False,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden[0]

    @property
    def routing(self) -> None:
        """None: the library's routers do not report their choices."""
        return None

    def _base_logits(self, hidden: Tensor, lora: LoraBatch, width: int) -> Tensor:
        """The library's own way from hidden states to logits, with its scales and caps."""
        self._of_head.lora, self._of_head.num_logits = lora, width
        self._states.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        self._states.hidden = None
        return logits[0].float()
