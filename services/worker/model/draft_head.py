"""The layer with which some bases predict one more token, from which drafts are made.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.adapter_format.text_model import FURTHER_TOKENS
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.operators import Operators
from loraplex_services.worker.model.build import Builder, dense_mlp
from loraplex_services.worker.model.decoder import DecoderLayer
from loraplex_services.worker.model.load import TensorWindow, Weights
from loraplex_services.worker.ops.linear.coded import CodedWeight
from loraplex_services.worker.ops.linear.torch import WeightRows
from loraplex_services.worker.ops.norm.torch import Norm
from loraplex_services.worker.ops.rope.torch import CosSin
from loraplex_services.worker.types.model_config import ModelConfig

_FC, _NORM = "mtp.fc", "mtp.norm"
_INPUT_NORMS = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
_NEEDED = (_FC, _NORM, *_INPUT_NORMS, "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.gate_proj")
_UNSERVED = ("mtp.embed_tokens", "mtp.layers.1.input_layernorm")
"""An embedding of its own, or a second layer."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """See above."""

    config: ModelConfig
    """The base's, with this layer as its last."""
    fc: LoraLinear
    norms: tuple[Norm, Norm]
    """Of the embedding and of the hidden state."""
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
    """The head of a base of one such layer with a dense MLP; None if its files have no other."""
    if not all(weights.has(f"{name}.weight") for name in _NEEDED) or config.moe is not None:
        return None
    if any(weights.has(f"{name}.weight") for name in _UNSERVED):
        return None
    layer, hidden = config.num_layers, config.hidden_size
    own = replace(config, windows=(*config.windows, None), ropes=(*config.ropes, config.ropes[0]))
    builder = Builder(own, LayerWeights(weights, layer), operators)
    inner = (builder.names.input_norm, builder.names.mlp_norm)
    names = (*_INPUT_NORMS, *(f"model.layers.{layer}.{name}" for name in inner))
    norms = [builder.norm(layer, name, hidden) for name in (*names, _NORM)]
    fc = builder.linear(layer, 2 * hidden, [(_FC, hidden)], has_bias=False)
    attention, mlp = builder.attention(layer), dense_mlp(builder, layer)
    decoder_layer = DecoderLayer(attention, mlp, (norms[2], norms[3]), None)
    return DraftHead(own, fc, (norms[0], norms[1]), decoder_layer, norms[4])


class LayerWeights:
    """Implements `Weights`: names the first further layer like one of the base's."""

    def __init__(self, weights: Weights, layer: int) -> None:
        self.dtype = weights.dtype
        self._weights = weights
        self._prefix = f"model.layers.{layer}."

    def _name(self, name: str) -> str:
        if name.startswith(self._prefix):
            return f"{FURTHER_TOKENS}layers.0." + name.removeprefix(self._prefix)
        return name

    def take(
        self,
        name: str,
        shape: Sequence[int],
        window: TensorWindow | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Weights`."""
        return self._weights.take(self._name(name), shape, window, dtype)

    def take_codes(self, name: str, shape: Sequence[int]) -> CodedWeight | None:
        """See `Weights`."""
        return self._weights.take_codes(self._name(name), shape)

    def rows_in_files(self, parts: Sequence[tuple[str, int]], num_inputs: int) -> WeightRows:
        """See `Weights`."""
        named = [(self._name(name), rows) for name, rows in parts]
        return self._weights.rows_in_files(named, num_inputs)

    def has(self, name: str) -> bool:
        """See `Weights`."""
        return self._weights.has(self._name(name))

    def finish(self) -> None:
        """Does nothing: the base is read next."""
