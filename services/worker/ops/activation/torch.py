"""Activations in torch on any device, and the gates of MLPs that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.types.model_config import ClampedSwiglu

GELU_TANH = frozenset(
    {"gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_fast", "gelu_new"}
)
"""Names of gelu by its tanh formula."""
_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    **dict.fromkeys(GELU_TANH, _gelu_tanh),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_10": lambda x: F.gelu(x).clamp(-10, 10),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}
"""Activations by the names of `hidden_act` in the transformers library. Names for several formulas
of one function share an activation here."""


Activation = str | ClampedSwiglu
Gate = Callable[[Tensor], Tensor]
"""act(gate) * up of stacked projections: `[T, 2 * width]` -> `[T, width]`. The gate is the first
half, but see `clamped_gate`."""
Gated = Callable[[Tensor, Tensor], Tensor]
"""act(a) * b, fresh; a may be repeated along the last dimension of b."""


def plain_gated(activation: str) -> Gated:
    """The product of an activation, in torch on any device."""
    activate = ACTIVATIONS[activation]
    return lambda a, b: activate(a) * b


def stacked_gate(gated: Gated) -> Gate:
    """The gate of stacked projections."""

    def gate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return gated(first, second)

    return gate


def plain_gate(activation: Activation) -> Gate:
    """The gate of an activation, in torch on any device."""
    if isinstance(activation, ClampedSwiglu):
        return clamped_gate(activation)
    return stacked_gate(plain_gated(activation))


def clamped_gate(swiglu: ClampedSwiglu) -> Gate:
    """See `ClampedSwiglu`."""

    def gate(x: Tensor) -> Tensor:
        first = x[..., ::2].clamp(max=swiglu.limit)
        second = x[..., 1::2].clamp(-swiglu.limit, swiglu.limit)
        return (second + 1) * (first * torch.sigmoid(first * swiglu.alpha))

    return gate
