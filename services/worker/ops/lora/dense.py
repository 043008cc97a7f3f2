"""The low-rank update of a long run, as library products.

The tokens of a long prompt use one adapter. A GPU's library then reads x once for all of a site's
slices and adds to y in one pass, which is faster than the kernel for any mix of adapters.
`runs.dense_runs` says which runs are long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.tables import SiteDelta, Tile
from loraplex_services.worker.ops.lora.torch import apply_vectors


def add_dense(y: Tensor, x: Tensor, delta: SiteDelta, run: RowRun) -> None:
    """`torch.add_lora` for one run: one product for A and one for each slice of B where their
    rows lie next to each other in the arena, else one for each stretch of rows. Launches only:
    nothing is copied to or from the host.

    Args:
        y: `[T, out]`, the base's product. Mutated.
        x: `[T, in]`, of y's dtype.

    Products are summed in float32. The intermediate A x is rounded once to y's dtype, which changes
    y by less than y's own rounding as long as the update is not larger than y.
    """
    rows = slice(run.begin, run.end)
    out = y[rows]
    if delta.a:
        shrunk = _shrink(x[rows], delta)
        for first, last, scale, tile in _products_of_b(delta):
            b = tile.data[first - tile.row_begin : last - tile.row_begin].to(y.dtype)
            columns = out[:, tile.col_begin : tile.col_end]
            columns.addmm_(shrunk[:, first:last], b, alpha=run.coef * scale)
    apply_vectors(out, delta, run.coef)


def _shrink(x: Tensor, delta: SiteDelta) -> Tensor:
    """x A^T, `[n, rank]`, of x's dtype. An int8 A is multiplied by its factors and scales."""
    tiles = _joined(delta.a)
    is_cut = any(tile.col_end - tile.col_begin < x.shape[1] for tile in tiles)
    if not is_cut and not delta.is_int8:
        if len(tiles) == 1:
            return x @ tiles[0].data.to(x.dtype).T
        shrunk = x.new_empty(len(x), delta.rank)
        for tile in tiles:
            target = shrunk[:, tile.row_begin : tile.row_end]
            torch.mm(x, tile.data.to(x.dtype).T, out=target)
        return shrunk
    total = torch.zeros(len(x), delta.rank, dtype=torch.float32, device=x.device)
    for tile in tiles:
        columns = x[:, tile.col_begin : tile.col_end]
        total[:, tile.row_begin : tile.row_end] += _product(columns, tile.data.to(x.dtype).T)
    if delta.is_int8:
        total *= delta.scales
    return total.to(x.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, summed and returned in float32."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _products_of_b(delta: SiteDelta) -> Iterator[tuple[int, int, float, Tile]]:
    """Rank rows [begin, end) of one slice, their scale, and the tile of B that has them."""
    tiles = _joined(delta.b)
    for part in delta.slices:
        begin, end = part.rank_begin, part.rank_begin + part.rank_len
        for tile in tiles:
            first, last = max(begin, tile.row_begin), min(end, tile.row_end)
            if first < last:
                yield first, last, 1.0 if delta.is_int8 else part.scale, tile


def _joined(tiles: Sequence[Tile]) -> list[Tile]:
    """The matrix in fewer tiles: those whose rows follow each other in the matrix and in
    memory, as they do in neighbouring blocks of the arena, become one view."""
    joined: list[Tile] = []
    for tile in tiles:
        before = joined[-1] if joined else None
        if before is None or not _follows(before, tile):
            joined.append(tile)
            continue
        shape = tile.row_end - before.row_begin, tile.col_end - tile.col_begin
        view = before.data.as_strided(shape, (shape[1], 1))
        joined[-1] = Tile(before.row_begin, tile.row_end, tile.col_begin, tile.col_end, view)
    return joined


def _follows(before: Tile, tile: Tile) -> bool:
    """Whether a tile's first row directly follows another's last one."""
    return (
        (before.row_end, before.col_begin, before.col_end)
        == (tile.row_begin, tile.col_begin, tile.col_end)
        and before.data.data_ptr() + before.data.nbytes == tile.data.data_ptr()
        and before.data.untyped_storage().data_ptr() == tile.data.untyped_storage().data_ptr()
    )
