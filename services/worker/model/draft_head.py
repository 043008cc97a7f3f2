"""The draft head: a layer with which some bases predict one more token, which becomes a draft.

It sees a position's hidden state after the last norm, and the token that comes next, and predicts
the token after that. Adapters act on the layers before it, not on itself. Tensors are named `mtp.*`
(multi-token prediction), as Qwen 3 Next and its successors publish them:

    x = fc([pre_fc_norm_embedding(embedding(next token)), pre_fc_norm_hidden(hidden)])
    y = norm(decoder layer with full attention (x))

The base's own head turns y into logits.

Sources: Gloeckle et al., Better & Faster Large Language Models via Multi-token Prediction, 2024.
For "after the last norm": `qwen3_next.py` and `qwen3_next_mtp.py` of vLLM (002d6073) and of SGLang
(0201bc80), whose heads take what their models return. Transformers does not run this layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.build import Builder, LayerNames, dense_mlp
from loraplex_services.worker.model.decoder import DecoderLayer
from loraplex_services.worker.model.load import Weights
from loraplex_services.worker.model.sparse import ExpertNames, sparse_mlp
from loraplex_services.worker.ops.norm.torch import Norm
from loraplex_services.worker.ops.rope.torch import CosSin
from loraplex_services.worker.types.model_config import ModelConfig

_FC, _NORM, _LAYER = "mtp.fc", "mtp.norm", "mtp.layers.0"
_INPUT_NORMS = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
_NEEDED = (_FC, _NORM, *_INPUT_NORMS, f"{_LAYER}.self_attn.q_proj")
_DENSE, _ROUTER = f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.gate"
"""Names of its MLP, which is dense or has experts, like those of most layers of the base."""
_UNSERVED = ("mtp.embed_tokens", "mtp.layers.1.input_layernorm")
"""An embedding of its own, or a second layer."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The draft head of one base."""

    config: ModelConfig
    """The base's, with this layer as its last."""
    fc: LoraLinear
    norms: tuple[Norm, Norm]
    """The norm of the embedding, and that of the hidden state."""
    layer: DecoderLayer
    norm: Norm

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos_sin: CosSin, batch: ForwardBatch
    ) -> Tensor:
        """`[T, H]` twice -> `[T, H]`; `batch` is without adapters."""
        of_embedding, of_hidden = self.norms
        normed = of_embedding.forward(embedded, batch.lora), of_hidden.forward(hidden, batch.lora)
        x = self.fc.forward(torch.cat(normed, dim=-1), batch.lora)
        update = self.layer.forward(x, None, cos_sin, batch)
        return self.norm.forward(x, batch.lora, update)


def build_draft_head(
    config: ModelConfig, weights: Weights, operators: Operators
) -> DraftHead | None:
    """The head of a base with one such layer; None if its files have another one or none."""
    mlp = _DENSE if config.moe is None else _ROUTER
    if not all(weights.has(f"{name}.weight") for name in (*_NEEDED, mlp)):
        return None
    if any(weights.has(f"{name}.weight") for name in _UNSERVED):
        return None
    layer, hidden = config.num_layers, config.hidden_size
    own = replace(config, windows=(*config.windows, None), ropes=(*config.ropes, config.ropes[0]))
    named = LayerNames(layer=_LAYER)
    builder = Builder(own, weights, operators, named)
    inner = (f"{_LAYER}.{named.input_norm}", f"{_LAYER}.{named.mlp_norm}")
    norms = [builder.norm(layer, name, hidden) for name in (*_INPUT_NORMS, *inner, _NORM)]
    fc = builder.linear(layer, 2 * hidden, [(_FC, hidden)], has_bias=False)
    make_mlp = dense_mlp if config.moe is None else partial(sparse_mlp, names=ExpertNames())
    attention = builder.attention(layer)
    decoder_layer = DecoderLayer(attention, make_mlp(builder, layer), (norms[2], norms[3]), None)
    return DraftHead(own, fc, (norms[0], norms[1]), decoder_layer, norms[4])
