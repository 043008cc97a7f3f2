"""One tensor-parallel rank's part of the weights: all of them, if the base is not divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_services.worker.model.load import TensorWindow, Weights, take_rows
from loraplex_services.worker.ops.linear.coded import CodedWeight
from loraplex_services.worker.types.sharding import WHOLE, Cut, Shard, padded_share


@dataclass(frozen=True, slots=True)
class ShardWeights:
    """Takes the parts of one rank."""

    weights: Weights
    shard: Shard
    keeps_half: bool = False
    """Whether matrices that are published in half precision stay so; see
    `Operators.keeps_half`."""

    def window(self, num_outputs: int, cut: Cut, dim: int = 0) -> TensorWindow | None:
        """The part that the rank has of a weight whose outputs are dimension `dim`; None = all."""
        if self.shard.size == 1 or cut is WHOLE:
            return None
        rows = self.shard.spans(cut.outputs) or [(0, num_outputs)]
        columns = self.shard.spans(cut.inputs)
        return TensorWindow(rows, columns[0] if columns else None, dim)

    def stacked(self, parts: Sequence[tuple[str, int]], num_inputs: int, cut: Cut) -> Tensor:
        """Tensors `[rows, num_inputs]` stacked by rows: (name, rows) each."""
        window = self.window(sum(rows for _, rows in parts), cut)
        return take_rows(self.weights, parts, num_inputs, window=window, keeps_half=self.keeps_half)

    def codes(
        self, name: str, shape: tuple[int, int], window: TensorWindow | None
    ) -> CodedWeight | None:
        """A window of a weight `[out, in]` in codes; None if it is plain."""
        weight = self.weights.take_codes(name, shape)
        if weight is None or window is None:
            return weight
        own = weight.outputs(window.rows)
        return own if window.columns is None else own.inputs(*window.columns)

    def bias(self, bias: Tensor, cut: Cut) -> Tensor:
        """The part of a bias, whose outputs are its last dimension, that the rank adds before a sum
        over the ranks: each rank its own outputs, or rank 0 all of them."""
        if self.shard.size == 1:
            return bias
        if cut.inputs:
            return bias if self.shard.rank == 0 else torch.zeros_like(bias)
        own = [bias[..., begin:end] for begin, end in self.shard.spans(cut.outputs)]
        return torch.cat(own, dim=-1) if own else bias

    def token_rows(self, name: str, vocab_size: int, width: int) -> Tensor:
        """A table with a row for each token, or the rank's rows of it, padded with zeros to as
        many as every other rank has."""
        dtype = self.weights.half_dtype(name) if self.keeps_half else None
        if self.shard.size == 1:
            return self.weights.take(name, (vocab_size, width), None, dtype)
        window = TensorWindow([self.shard.vocabulary(vocab_size)])
        rows = self.weights.take(name, (vocab_size, width), window, dtype)
        missing = padded_share(vocab_size, self.shard.size) - len(rows)
        return F.pad(rows, (0, 0, 0, missing))

    def token_codes(self, table: CodedWeight) -> CodedWeight:
        """`token_rows` of a table in codes."""
        if self.shard.size == 1:
            return table
        own = self.shard.vocabulary(table.out_features)
        return table.outputs([own], padded_share(table.out_features, self.shard.size))
