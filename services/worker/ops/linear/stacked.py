"""Stacked linears that share an input but not a format; their outputs are concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_services.worker.ops.linear.torch import BaseLinear


class StackedLinear:
    """Implements `BaseLinear` over several."""

    def __init__(self, parts: Sequence[BaseLinear]) -> None:
        """`parts`: in the order of their outputs, with equal inputs."""
        self._parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> fresh `[T, out]`."""
        return torch.cat([part.apply(x) for part in self._parts], dim=-1)

    def apply_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> fresh float32 `[T, out]`."""
        return torch.cat([part.apply_float32(x) for part in self._parts], dim=-1)

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end), float32."""
        found, first = [], 0
        for part in self._parts:
            own = max(begin - first, 0), min(end - first, part.out_features)
            if own[0] < own[1]:
                found.append(part.weight_rows(*own))
            first += part.out_features
        return torch.cat(found) if found else self._parts[0].weight_rows(0, 0)
