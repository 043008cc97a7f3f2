"""Exchanges between the layers of tensor-parallel ranks: sums, and the parts of wide rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from loraplex_services.worker.ops.linear.torch import BaseLinear, keeps_float32
from loraplex_services.worker.types.sharding import ONLY, Shard, share_of


class Ranks(Protocol):
    """The group of ranks that share a base; each calls the same methods in the same order."""

    @property
    def shard(self) -> Shard:
        """The number of this rank, and of all."""
        ...

    @property
    def num_local(self) -> int:
        """Number of ranks on this machine, which share its cores and memory."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, equal bits on each of them. Mutates and returns x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """`[ranks, *x.shape]`: every rank's x, of one shape."""
        ...

    def gather(self, x: Tensor, num_columns: int) -> Tensor:
        """All ranks' columns side by side, cut to `num_columns`, on rank 0; zeros on the others.

        Args:
            x: `[n, columns]`, of the same shape on every rank.
        """
        ...

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's x to every rank. Mutates x."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """A base that is not divided."""

    shard: Shard = ONLY
    num_local: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of one."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """One row."""
        return x[None]

    def gather(self, x: Tensor, num_columns: int) -> Tensor:
        """All columns are here."""
        return x[:, :num_columns]

    def broadcast(self, x: Tensor) -> None:
        """There are no other ranks."""


class GatheredLinear:
    """A base linear whose outputs are divided among the ranks and gathered on rank 0."""

    def __init__(self, own: BaseLinear, out_features: int, ranks: Ranks) -> None:
        """
        Args:
            own: this rank's outputs, as many as every other rank's.
            out_features: of all ranks, without the padding of the last one.
        """
        self.in_features = own.in_features
        self.out_features = out_features
        self._own = own
        self._ranks = ranks

    def apply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]` on rank 0."""
        return self._ranks.gather(self._own.apply(x), self.out_features)

    def apply_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> float32 `[T, out]` on rank 0. Other ranks may call `apply` instead unless
        `keeps_float32(x)`: ranks must gather one dtype."""
        if not keeps_float32(x):
            return self.apply(x).float()
        return self._ranks.gather(self._own.apply_float32(x), self.out_features)

    def own_columns(self, x: Tensor) -> Tensor:
        """`[T, in]` -> fresh float32 `[T, own]`: this rank's outputs, without padding."""
        y = self._own.apply_float32(x) if keeps_float32(x) else self._own.apply(x).float()
        shard = self._ranks.shard
        begin, end = share_of(self.out_features, shard.rank, shard.size)
        return y[:, : end - begin].contiguous()

    def weight_rows(self, begin: int, end: int) -> Tensor:
        """No rank has them all; adapters are packed from files."""
        raise NotImplementedError
