"""Notes which experts the layers of one pass choose, for requests that ask for it."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.api.output import RoutingShape

_DTYPES = {1: torch.uint8, 2: torch.int16}
"""Integer types by their size in bytes. No base has so many experts that the second needs its sign
bit."""


class RoutingNotes:
    """The experts of one pass."""

    def __init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}

    def add(self, layer: int, chosen: Tensor) -> None:
        """Note the experts that a layer chose, int64 `[T, k]`."""
        assert layer not in self._chosen, f"layer {layer} chose twice"
        self._chosen[layer] = chosen

    def clear(self) -> None:
        """Forget everything, before another pass."""
        self._chosen.clear()

    def copy(self, notes: RoutingNotes, num_rows: int) -> None:
        """Take over the first rows of what another pass noted, which the next one overwrites."""
        self._chosen = {layer: chosen[:num_rows].clone() for layer, chosen in notes._chosen.items()}

    def of_tokens(self, routing: RoutingShape) -> Tensor:
        """All experts, `[T, layers, k]`, as `RoutedExperts` holds them."""
        first = next(iter(self._chosen.values()))
        shape = len(first), routing.num_layers, routing.num_active
        noted = first.new_zeros(shape, dtype=_DTYPES[routing.expert_bytes])
        for layer, chosen in self._chosen.items():
            noted[:, layer] = chosen
        return noted
