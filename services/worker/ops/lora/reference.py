"""Reference in float64: one row, one adapter, one slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loraplex_services.worker.ops.lora.tables import SiteDelta, Tile
from loraplex_services.worker.ops.lora.worklist import LoraBatch


def add_lora(y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
    """y[t] = gain * (y[t] + sum coef * (scale * B (A x[t]) + lora bias)) + bias delta.

    Args:
        y: `[T, out]`, the base's product. Mutated.
        x: `[T, in]`.
    """

    def shrink(delta: SiteDelta, row: int) -> Tensor:
        return _dense(delta.a, delta.rank, x.shape[1], fill=0.0) @ x[row].double()

    def replace(delta: SiteDelta, row: int, total: Tensor) -> None:
        assert delta.row_ids is not None
        own = _dense(delta.rows, len(delta.row_ids), x.shape[1], fill=0.0)
        total[delta.row_ids] = own @ x[row].double()

    _each_row(y, site_id, lora, shrink, replace)


def add_lora_embedding(y: Tensor, token_ids: Tensor, site_id: int, lora: LoraBatch) -> None:
    """`add_lora` at the embedding, where A x[t] = column token_ids[t] of A.

    Args:
        y: `[T, out]`, the base's embeddings. Mutated.
        token_ids: int64 `[T]`.
    """

    def shrink(delta: SiteDelta, row: int) -> Tensor:
        num_rows = max(tile.row_end for tile in delta.a)
        return _dense(delta.a, num_rows, delta.rank, fill=0.0)[token_ids[row]]

    def replace(delta: SiteDelta, row: int, total: Tensor) -> None:
        assert delta.row_ids is not None
        own = _dense(delta.rows, len(delta.row_ids), y.shape[1], fill=0.0)
        for token_id, values in zip(delta.row_ids.tolist(), own, strict=True):
            if token_id == int(token_ids[row]):
                total.copy_(values)

    _each_row(y, site_id, lora, shrink, replace)


def _each_row(
    y: Tensor,
    site_id: int,
    lora: LoraBatch,
    shrink: Callable[[SiteDelta, int], Tensor],
    replace: Callable[[SiteDelta, int, Tensor], None],
) -> None:
    num_outputs = y.shape[1]
    for row in range(len(y)):
        total = y[row].double()
        gain, bias = torch.ones_like(total), torch.zeros_like(total)
        for run in lora.runs:
            delta = lora.table.get((run.slot, site_id))
            if delta is None or not run.begin <= row < run.end:
                continue
            if delta.row_ids is not None:
                replace(delta, row, total)
            if delta.slices:
                total += run.coef * _expand(delta, shrink(delta, row), num_outputs)
            total += run.coef * _vector(delta.lora_biases, total, fill=0.0)
            gain *= _vector(delta.gains, total, fill=1.0)
            bias += _vector(delta.biases, total, fill=0.0)
        y[row] = (gain * total + bias).to(y.dtype)


def _expand(delta: SiteDelta, shrunk: Tensor, num_outputs: int) -> Tensor:
    b = _dense(delta.b, delta.rank, num_outputs, fill=0.0)
    out = torch.zeros(num_outputs, dtype=torch.float64, device=shrunk.device)
    for part in delta.slices:
        ranks = slice(part.rank_begin, part.rank_begin + part.rank_len)
        outs = slice(part.out_begin, part.out_begin + part.out_len)
        out[outs] += b[ranks, outs].T @ (delta.scales[ranks].double() * shrunk[ranks])
    return out


def _vector(tiles: Sequence[Tile], like: Tensor, fill: float) -> Tensor:
    """One row of tiles, of the shape and on the device of `like`; `fill` if there are none."""
    return _dense(tiles, 1, len(like), fill)[0].to(like.device)


def _dense(tiles: Sequence[Tile], num_rows: int, num_columns: int, fill: float) -> Tensor:
    device = tiles[0].data.device if tiles else None
    matrix = torch.full((num_rows, num_columns), fill, dtype=torch.float64, device=device)
    for tile in tiles:
        rows, columns = slice(tile.row_begin, tile.row_end), slice(tile.col_begin, tile.col_end)
        matrix[rows, columns] = tile.data.double()
    return matrix
