"""Root-mean-square normalization in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraplex_services.worker.ops.lora.worklist import LoraBatch


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A norm as published."""

    weight: Tensor
    """`[H]`."""
    eps: float
    offset: float
    """Added to the weight."""
    in_float32: bool
    """True: multiply before rounding to x's dtype (Gemma), else after (Llama); the two differ in
    half precision only."""


def scaling_weight(norm: NormWeight) -> Tensor:
    """The factor of the normalized values, in the dtype of the product."""
    return norm.weight.float() + norm.offset if norm.in_float32 else norm.weight


class Norm(Protocol):
    """x / rms(x) * (weight + offset), computed in float32; adapters may replace the weight."""

    def forward(self, x: Tensor, lora: LoraBatch, update: Tensor | None = None) -> Tensor:
        """`[T, ..., H]` -> fresh `[T, ..., H]`; `lora` runs over the T rows.

        `update`, where given, is added to x first, in place.
        """
        ...


class RmsNorm:
    """A norm in plain torch."""

    def __init__(self, site_id: int, norm: NormWeight) -> None:
        self.site_id = site_id
        self._eps = norm.eps
        self._in_float32 = norm.in_float32
        self.weight = scaling_weight(norm)

    def forward(self, x: Tensor, lora: LoraBatch, update: Tensor | None = None) -> Tensor:
        """See `Norm`."""
        if update is not None:
            x.add_(update)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        y = self._scaled(wide, self.weight, x.dtype)
        for run in lora.runs:
            delta = lora.table.get((run.slot, self.site_id))
            for tile in delta.norm if delta is not None else ():
                columns = slice(tile.col_begin, tile.col_end)
                own = self._scaled(wide[run.begin : run.end, ..., columns], tile.data[0], x.dtype)
                y[run.begin : run.end, ..., columns] = own
        return y

    def _scaled(self, wide: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if self._in_float32:
            return (wide * weight).to(dtype)
        return weight.to(dtype) * wide.to(dtype)
