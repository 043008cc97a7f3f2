"""The rotary embeddings of all layers, of the base and of adapters in their slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_services.worker.ops.rope.torch import CosSin, Rotary
from loraplex_services.worker.types.model_config import RopeConfig

BASE_ROWS = 2
"""Rows of each table before the first slot's: see `Rotary`."""


class Ropes:
    """The table row that rotates each token, and the tables, one for each kind of layer."""

    def __init__(self, layers: Sequence[RopeConfig], device: torch.device) -> None:
        kinds = list(dict.fromkeys(layers))
        self._rotaries = [Rotary(rope, device) for rope in kinds]
        self._of_layer = [kinds.index(rope) for rope in layers]
        self._slots: set[int] = set()

    def reserve(self, num_slots: int) -> None:
        """Reserve rows for adapters with rotary embeddings of their own, in slots below
        `num_slots`."""
        for rotary in self._rotaries:
            rotary.reserve(BASE_ROWS + 2 * num_slots)

    def enter(self, slot: int, layers: Sequence[RopeConfig]) -> None:
        """An adapter has rotary embeddings of its own, one for each layer."""
        for kind, rotary in enumerate(self._rotaries):
            rotary.set(BASE_ROWS + 2 * slot, layers[self._of_layer.index(kind)])
        self._slots.add(slot)

    def remove(self, slot: int) -> None:
        """The slot is no longer in use."""
        self._slots.discard(slot)

    @property
    def has_own(self) -> bool:
        """Whether any resident adapter has a rotary embedding of its own."""
        return bool(self._slots)

    def row(self, slots: Sequence[tuple[int, float]], is_long: bool) -> int:
        """Table row of a request with adapters in `slots`; those with a rope are always alone."""
        own = bool(slots) and slots[0][0] in self._slots
        return (BASE_ROWS + 2 * slots[0][0] if own else 0) + is_long

    def by_layer(
        self, positions: Tensor, dtype: torch.dtype, rows: Tensor | None
    ) -> Sequence[CosSin]:
        """Cosines and sines for int64 positions `[T]` and rows `[T]`; None = the base's."""
        rotations = [rotary.cos_sin(positions, dtype, rows) for rotary in self._rotaries]
        return [rotations[kind] for kind in self._of_layer]
