"""Replaces linears, embedding and attention in a model of the transformers library.

The library's forward pass has no argument for adapters or for a paged cache. What a pass reads is
therefore set on one object that all of these modules share, for the length of the pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex.errors import Unsupported
from loraplex_services.worker.layers.embedding import LoraEmbedding
from loraplex_services.worker.layers.forward_batch import ForwardBatch
from loraplex_services.worker.layers.lora_linear import LoraLinear
from loraplex_services.worker.layers.moe import ExpertMlps
from loraplex_services.worker.ops.activation.torch import ACTIVATIONS, plain_gate
from loraplex_services.worker.ops.attention.backend import AttentionBackend
from loraplex_services.worker.ops.lora.worklist import LoraBatch

ATTENTION = "loraplex_paged"
"""The name of `attend` in the library's registry of attention functions."""
_HARMLESS = frozenset(
    """
    cache_position dropout is_causal output_attentions output_hidden_states output_router_logits
    position_ids use_cache
    """.split()
)
"""Arguments of attention functions that change nothing here."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How one layer calls attention."""

    layer: int
    source: int
    """The layer whose keys and values it reads: its own, or an earlier one's."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class CurrentPass:
    """The inputs of a pass of the body, or of the head."""

    batch: ForwardBatch | None = None
    """None while the model is asked how it calls attention."""
    lora: LoraBatch | None = None
    """The adapters of the rows of the pass."""
    num_logits: int = 0
    """Width of the logits; 0 = the base's."""
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    """The keys of the layers' calls, as long as calls are noted."""
    sinks: dict[int, Tensor] = field(default_factory=dict)
    backends: dict[int, AttentionBackend] = field(default_factory=dict)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear, whose weight is `[in, out]`."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def is_product(module: nn.Module) -> bool:
    """Whether all that it computes is a linear map: subclasses of `nn.Linear` may do more."""
    if type(module) is nn.Linear or is_conv1d(module):
        return True
    if not isinstance(module, nn.Linear):
        return False
    rows = torch.linspace(-1.0, 1.0, 2 * module.in_features).view(2, -1).to(module.weight.dtype)
    out, product = module(rows), F.linear(rows, module.weight, module.bias)
    return isinstance(out, Tensor) and torch.allclose(out, product, rtol=0.02, atol=0.02)


def are_gated_experts(module: Any, activation: object) -> bool:
    """Whether it is the experts of a layer and computes them as `ExpertMlps` does, with stacked
    weights `[experts, 2 * width, hidden]` and `[experts, hidden, width]`."""
    if not hasattr(module, "_apply_gate") or activation not in ACTIVATIONS:
        return False  # each class whose implementation the library can exchange has the method
    up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if up is None or down is None or down.shape != (len(up), up.shape[2], up.shape[1] // 2):
        return False
    rows = torch.linspace(-1.0, 1.0, 2 * up.shape[2]).view(2, -1).to(up.dtype)
    chosen, weights = torch.tensor([[0], [len(up) - 1]]), torch.tensor([[1.0], [0.5]])
    out, gate = module(rows, chosen, weights.to(up.dtype)), plain_gate(str(activation))
    experts = chosen.flatten().tolist()
    inner = gate(torch.stack([up[e] @ row for e, row in zip(experts, rows, strict=True)]))
    products = torch.stack([down[e] @ row for e, row in zip(experts, inner, strict=True)])
    return bool((out - weights * products).norm() <= 0.02 * (weights * products).norm())


class SiteLinear(nn.Module):
    """A linear with the adapters of the batch."""

    def __init__(self, linear: LoraLinear, dtype: torch.dtype, current: CurrentPass) -> None:
        super().__init__()
        self._linear = linear
        self._current = current
        self.in_features = linear.base.in_features
        self.out_features = linear.base.out_features
        shape = self.out_features, self.in_features
        self.weight = torch.empty(shape, dtype=dtype, device="meta")
        """Without values: some classes ask for its dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """`[1, T, in]` -> `[1, T, out]`."""
        assert self._current.lora is not None, "set for each pass"
        y = self._linear.forward(x.flatten(0, -2), self._current.lora)
        return y.view(*x.shape[:-1], -1)


class SiteHead(SiteLinear):
    """The head: float32 logits, as wide as the widest adapter's."""

    def forward(self, x: Tensor) -> Tensor:
        """`[1, n, H]` -> float32 `[1, n, V]`."""
        current = self._current
        assert current.lora is not None, "set for each pass"
        y = self._linear.forward_float32(x.flatten(0, -2), current.lora, current.num_logits)
        return y.view(*x.shape[:-1], -1)


class SiteExperts(nn.Module):
    """The experts of a layer with the adapters of the batch."""

    def __init__(self, experts: ExpertMlps, current: CurrentPass) -> None:
        super().__init__()
        self._experts = experts
        self._current = current

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`[T, H]`, expert numbers `[T, k]` and their weights `[T, k]` -> `[T, H]`."""
        assert self._current.lora is not None, "set for each pass"
        chosen, weights = chosen.long().contiguous(), weights.float().contiguous()
        return self._experts.forward(x, chosen, weights, self._current.lora)


class SiteEmbedding(nn.Module):
    """The embedding with the adapters of the batch."""

    def __init__(self, embedding: LoraEmbedding, scale: float, current: CurrentPass) -> None:
        super().__init__()
        self.weight = embedding.weight
        """Some classes ask for its device."""
        self._embedding = embedding
        self._scale = scale
        self._current = current

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 `[1, T]` -> `[1, T, hidden]`."""
        assert self._current.lora is not None, "set for each pass"
        y = self._embedding.forward(token_ids[0], self._current.lora)[None]
        return y if self._scale == 1.0 else y * torch.tensor(self._scale, dtype=y.dtype)


class PassPositions:
    """Replaces the library's cache in layers that derive positions from its length."""

    def __init__(self, current: CurrentPass) -> None:
        self._current = current

    def get_seq_length(self, _layer: int = 0) -> Tensor:
        """int64 `[T]`: number of tokens before the pass, if each row counted those of its own
        sequence: its position less its row."""
        assert self._current.batch is not None, "set for each pass"
        positions = self._current.batch.positions
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, key: Tensor, value: Tensor, _layer: int) -> tuple[Tensor, Tensor]:
        """The same: `attend` writes them to the paged cache."""
        return key, value


class KnownStates(nn.Module):
    """Replaces the body of a model of which only the head is run."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    @property
    def decoder(self) -> KnownStates:
        """The body, which some classes reach in two steps."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output that the body would return, with `hidden`."""
        return _output_class()(last_hidden_state=self.hidden)


@cache
def _output_class() -> Any:
    """The class of a body's output. Attributes that the body would not set are None."""
    from transformers.modeling_outputs import BaseModelOutput

    def absent(_self: Any, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    return type("KnownOutput", (BaseModelOutput,), {"__getattr__": absent})


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of the library: heads `[1, heads, T, D]` -> `[1, T, heads, D]`.

    Values may be narrower than keys, as those of latent attention are: they are padded with zeros.
    While the model is asked how it calls attention, the call is kept, and zeros are returned.

    Raises:
        Unsupported: the layer calls it in a way that our backends do not compute.
    """
    current: CurrentPass = module.loraplex_pass
    layer, width, head_dim = module.layer_idx, value.shape[-1], query.shape[-1]
    if current.batch is None:
        # attention_mask: None, unless a class makes one of its own
        _check_call(module, query, key, value, {**others, "attention_mask": attention_mask})
        source = next((other for other, known in current.keys.items() if known is key), layer)
        scale = head_dim**-0.5 if scaling is None else scaling
        heads = query.shape[1], key.shape[1], head_dim
        current.keys[layer] = key
        current.calls[layer] = AttentionCall(layer, source, *heads, scale, sliding_window, softcap)
        if s_aux is not None:
            current.sinks[layer] = s_aux.detach().float()
        return query.new_zeros(1, query.shape[2], query.shape[1], width), None
    if width < head_dim:
        value = F.pad(value, (0, head_dim - width))
    q, k, v = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
    y = current.backends[layer].forward(q, k, v, current.batch.attention)
    return y.view(1, len(y), query.shape[1], -1)[..., :width].contiguous(), None


def _check_call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, others: dict[str, Any]
) -> None:
    """Raises: Unsupported for a call that our backends do not compute."""
    name = type(module).__name__
    unknown = sorted(k for k, v in others.items() if v is not None and k not in _HARMLESS)
    if unknown:
        raise Unsupported.field(
            f"{name}.{unknown[0]}", "", "is an attention layer that is not served"
        )
    is_known = module.layer_idx in module.loraplex_pass.calls
    if is_known or not getattr(module, "is_causal", True):
        raise Unsupported.field(name, "", "is not plain causal self-attention, once in each layer")
    is_even = value.shape[:-1] == key.shape[:-1] and key.shape[-1] == query.shape[-1]
    if not is_even or value.shape[-1] > key.shape[-1]:
        raise Unsupported.field(name, "", "has values that are wider than its keys")
