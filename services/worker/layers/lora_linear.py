"""A site: the base's linear, the adapters of the batch, and the bias.

    y = gain(row) * (W x + sum coef * scale * B (A x)) + bias + bias_delta(row)

`gain` is DoRA's. The bias is added separately and is not part of the base product, because a gain
must not scale it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.ops.linear.torch import BaseLinear, JoinedGate, keeps_float32
from loraplex_services.worker.ops.lora import torch as portable
from loraplex_services.worker.ops.lora.worklist import LoraBatch


@runtime_checkable
class JoinedUpdate(Protocol):
    """A low-rank update that may be computed together with the base product."""

    def product(self, base: BaseLinear, x: Tensor, site_id: int, lora: LoraBatch) -> Tensor:
        """`[T, in]` -> fresh `[T, out]`: the base product with the update."""
        ...


@runtime_checkable
class GatedUpdate(Protocol):
    """A low-rank update that may be computed together with the gates of its outputs."""

    def add_gated(
        self, base: BaseLinear, x: Tensor, site_id: int, lora: LoraBatch
    ) -> Tensor | None:
        """`[T, in]` -> fresh `[T, width]`: `JoinedGate.gated` with the update; None = it must be
        computed in steps."""
        ...


class LoraLinear:
    """One site of the model."""

    def __init__(
        self,
        site_id: int,
        base: BaseLinear,
        bias: Tensor | None,
        add_lora: Callable[[Tensor, Tensor, int, LoraBatch], None],
        sum_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`base` and its `bias`, `[out]`, to which `add_lora` adds the adapters of a batch.

        Args:
            sum_ranks: where the inputs are divided among ranks, and so each rank's outputs, those
                of adapters included, are addends of the result.
        """
        self.site_id = site_id
        self.base = base
        self.bias = bias
        self._add_lora = add_lora
        self._sum_ranks = sum_ranks
        self._joined = add_lora if isinstance(add_lora, JoinedUpdate) else None
        self._gated = add_lora if isinstance(add_lora, GatedUpdate) else None
        self._gates = base.gated if isinstance(base, JoinedGate) and bias is None else None

    def gated(self, x: Tensor, lora: LoraBatch) -> Tensor | None:
        """Stacked gates and outputs that they multiply: `[T, in]` -> fresh `[T, width]`. None = the
        gates must be applied to the result of `forward`."""
        if self._gates is None:
            return None
        if not lora.runs:
            return self._gates(x)
        if self._gated is None:
            return None
        return self._gated.add_gated(self.base, x, self.site_id, lora)

    def forward(self, x: Tensor, lora: LoraBatch, num_outputs: int = 0) -> Tensor:
        """`[T, in]` -> `[T, out]`; `lora` holds the batch's row runs over the same T rows.

        If `num_outputs` is more than the base has, the result is widened for adapters with more.
        """
        if self._joined is not None and num_outputs <= self.base.out_features:
            y = self._joined.product(self.base, x, self.site_id, lora)
        else:
            y = self._widened(self.base.apply(x), num_outputs)
            self._add_lora(y, x, self.site_id, lora)
        if self._sum_ranks is not None:
            y = self._sum_ranks(y)
        return y if self.bias is None else y.add_(self.bias)

    def forward_float32(self, x: Tensor, lora: LoraBatch, num_outputs: int) -> Tensor:
        """`forward` with a float32 result, which is not rounded to x's dtype in between if the
        device allows that. Adapters are then added in torch, because kernels need y in x's
        dtype."""
        if not keeps_float32(x):
            is_base_alone = self._joined is None and self.bias is None and not lora.runs
            if is_base_alone and num_outputs <= self.base.out_features:
                return self.base.apply_float32(x)
            return self.forward(x, lora, num_outputs).float()
        y = self._widened(self.base.apply_float32(x), num_outputs)
        lora.await_site(self.site_id)
        portable.add_lora(y, x, self.site_id, lora)
        return y if self.bias is None else y.add_(self.bias)

    def _widened(self, y: Tensor, num_outputs: int) -> Tensor:
        missing = num_outputs - self.base.out_features
        return F.pad(y, (0, missing)) if missing > 0 else y
