"""The base model's linear layer, without bias, and the interface of quantised ones."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor


class WeightRows(Protocol):
    """The methods of a base weight `[out, in]` that packing an adapter needs."""

    out_features: int
    in_features: int

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) as the layer uses them, float32 `[end - begin, in]`."""
        ...


class BaseLinear(WeightRows, Protocol):
    """The methods of a base weight `[out, in]` that a LoRA layer and DoRA need."""

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> fresh `[T, out]`."""
        ...

    def apply_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> fresh float32 `[T, out]`, not rounded to x's dtype where
        `keeps_float32(x)`."""
        return self.apply(x).float()


@runtime_checkable
class ChoosesBest(Protocol):
    """A base weight whose largest output is found without storing all of them."""

    def best(self, x: Tensor) -> Tensor:
        """`[T, in]` -> fresh int64 `[T]`: the index of each row's largest output as `apply` rounds
        it, the lowest among equals."""
        ...


@runtime_checkable
class JoinedGate(Protocol):
    """A base weight of stacked gates and outputs that they multiply, `[2 * width, in]`."""

    def gated(self, x: Tensor) -> Tensor:
        """`[T, in]` -> fresh `[T, width]`: act(gates) * outputs, both rounded as `apply` does."""
        ...


def keeps_float32(x: Tensor) -> bool:
    """Whether products of x and a weight of its dtype can be stored in float32 as they are summed.

    GPU libraries sum half-precision products in float32, and can store that sum. Elsewhere the
    product is rounded to x's dtype first.
    """
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


class DenseLinear:
    """A plain weight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.shape

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return F.linear(x, self.weight)

    def apply_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> float32 `[T, out]`."""
        if keeps_float32(x):
            return torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return self.apply(x).float()

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        return self.weight[begin:end].float()
