"""The base model's linear layer, without bias. Quantised bases plug in here."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class BaseLinear(Protocol):
    """What a LoRA layer and DoRA need of a base weight `[out, in]`."""

    out_features: int
    in_features: int

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> fresh `[T, out]`."""
        ...

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) as the layer uses them, float32 `[end - begin, in]`."""
        ...


class DenseLinear:
    """A plain weight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.shape

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return F.linear(x, self.weight)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        return self.weight[begin:end].float()
