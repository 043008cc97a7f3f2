"""The low-rank update of a run that is nearly the whole step, as library products.

Where a step is one long prompt, or prompts of one adapter, and the rank is high, arithmetic rules
instead of bytes, and a GPU's library multiplies faster than tiles that any mix of adapters fits
into. `plan.is_dense` says when; README.md has the arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.kernels.lora.runs import RowRun
from services.worker.kernels.lora.tables import SiteDelta, Tile
from services.worker.kernels.lora.torch import apply_vectors


def add_dense(y: Tensor, x: Tensor, delta: SiteDelta, run: RowRun) -> None:
    """As `torch.add_lora` for one run. Launches only: no copy to or from the host.

    Args:
        y: `[T, out]`, the base's product. Mutated.
        x: `[T, in]`, of y's dtype.

    The intermediate is float32, and goes into the second product as two numbers of y's dtype beside
    each other, so that it is not rounded to one. That product adds to y where y lies: one read and
    one write, as tiles have.
    """
    rows = slice(run.begin, run.end)
    out, inputs = y[rows], x[rows]
    shrunk = torch.zeros(len(inputs), delta.rank, dtype=torch.float32, device=y.device)
    for tile in delta.a:
        columns = inputs[:, tile.col_begin : tile.col_end]
        shrunk[:, tile.row_begin : tile.row_end] += _product(columns, tile.data.to(y.dtype).T)
    shrunk *= delta.scales * run.coef
    parts = [shrunk.to(y.dtype)]
    if y.dtype is not torch.float32:
        parts.append((shrunk - parts[0]).to(y.dtype))
    by_columns: dict[tuple[int, int], list[Tile]] = {}
    for tile in delta.b:
        by_columns.setdefault((tile.col_begin, tile.col_end), []).append(tile)
    for (begin, end), tiles in by_columns.items():
        left = [part[:, tile.row_begin : tile.row_end] for part in parts for tile in tiles]
        right = [tile.data.to(y.dtype) for tile in tiles] * len(parts)
        out[:, begin:end].addmm_(torch.cat(left, 1), torch.cat(right))
    apply_vectors(out, delta, run.coef)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """float32, of the rank's size."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
