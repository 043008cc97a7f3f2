"""A site: the base's linear, the adapters of the batch, and the bias.

    y = gain(row) * (W x + sum coef * scale * B (A x)) + bias + bias_delta(row)

`gain` is DoRA's; the bias is an argument and never part of the base product, so that a gain cannot
touch it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from services.worker.kernels.lora.worklist import LoraBatch
from services.worker.layers.linear import BaseLinear


class LoraLinear:
    """One site of the model."""

    def __init__(
        self,
        site_id: int,
        base: BaseLinear,
        bias: Tensor | None,
        add_lora: Callable[[Tensor, Tensor, int, LoraBatch], None],
    ) -> None:
        self.site_id = site_id
        self.base = base
        self._bias = bias
        self._add_lora = add_lora

    def forward(self, x: Tensor, lora: LoraBatch) -> Tensor:
        """`[T, in]` -> `[T, out]`; `lora` holds the batch's row runs over the same T rows."""
        y = self.base.apply(x)
        self._add_lora(y, x, self.site_id, lora)
        return y if self._bias is None else y.add_(self._bias)
