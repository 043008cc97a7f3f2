"""What one tensor-parallel rank takes of the weights: all of them, if the base is not divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.model.load import TensorWindow, Weights, take_rows, take_window
from loraplex_services.worker.types.sharding import WHOLE, Cut, Shard, padded_share


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """Takes the parts of one rank."""

    weights: Weights
    shard: Shard

    def window(self, num_outputs: int, cut: Cut, dim: int = 0) -> TensorWindow | None:
        """What the rank has of a weight whose outputs are a dimension; None = all of it."""
        if self.shard.size == 1 or cut is WHOLE:
            return None
        rows = self.shard.spans(cut.outputs) or [(0, num_outputs)]
        columns = self.shard.spans(cut.inputs)
        return TensorWindow(rows, columns[0] if columns else None, dim)

    def stacked(self, parts: Sequence[tuple[str, int]], num_inputs: int, cut: Cut) -> Tensor:
        """Tensors `[rows, num_inputs]` stacked by rows: (name, rows) each."""
        window = self.window(sum(rows for _, rows in parts), cut)
        if window is None:
            return take_rows(self.weights, parts, num_inputs)
        return take_window(self.weights, parts, [num_inputs], window)

    def token_rows(self, name: str, vocab_size: int, width: int) -> Tensor:
        """A table with a row for each token, or the rank's rows of it, padded with zeros to as
        many as every other rank has."""
        if self.shard.size == 1:
            return self.weights.take(name, (vocab_size, width))
        window = TensorWindow([self.shard.vocabulary(vocab_size)])
        rows = self.weights.take(name, (vocab_size, width), window)
        missing = padded_share(vocab_size, self.shard.size) - len(rows)
        return F.pad(rows, (0, 0, 0, missing))
