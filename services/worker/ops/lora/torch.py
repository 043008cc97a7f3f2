"""The low-rank update in plain torch: dense products over row runs and views of tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_services.worker.ops.lora.tables import SiteDelta, Tile
from loraplex_services.worker.ops.lora.worklist import LoraBatch


def add_lora(y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
    """Semantics: y[t] = gain * (y[t] + sum coef * (scale * B (A x[t]) + lora bias)) + bias delta,
    summed over t's adapters; outputs with a row of the adapter's own start from that row times x.

    Args:
        y: `[T, out]`, the base's product, contiguous rows. Mutated.
        x: `[T, in]`, same dtype as y and the tiles.
        site_id: which entries of the table apply.
        lora: row runs over the T rows; rows outside of every run stay as they are.

    The rank-sized intermediate, its scale and coefficient are float32.
    """
    for run in lora.runs:
        delta = lora.table.get((run.slot, site_id))
        if delta is not None:
            out, rows = y[run.begin : run.end], x[run.begin : run.end]
            if delta.row_ids is not None:
                replace_outputs(out, rows, delta.rows, delta.row_ids)
            if delta.a:
                expand(out, shrink(rows, delta.a, delta.rank), delta, run.coef)
            apply_vectors(out, delta, run.coef)


def add_lora_embedding(y: Tensor, token_ids: Tensor, site_id: int, lora: LoraBatch) -> None:
    """`add_lora` at the embedding, where A x[t] is column token_ids[t] of A.

    Args:
        y: `[T, out]`, the base's embeddings. Mutated.
        token_ids: int64 `[T]`.
    """
    for run in lora.runs:
        delta = lora.table.get((run.slot, site_id))
        if delta is not None:
            out, ids = y[run.begin : run.end], token_ids[run.begin : run.end]
            if delta.row_ids is not None:
                replace_looked_up(out, ids, delta)
            if delta.a:
                expand(out, look_up(ids, delta), delta, run.coef)
            apply_vectors(out, delta, run.coef)


def replace_outputs(y: Tensor, x: Tensor, rows: Sequence[Tile], row_ids: Tensor) -> None:
    """y[:, row_ids] = x rows^T."""
    products = torch.zeros(len(x), len(row_ids), dtype=torch.float32, device=x.device)
    wide = x.float()
    for tile in rows:
        _shrink_tile(products, wide, tile)
    y[:, row_ids] = products.to(y.dtype)


def replace_looked_up(y: Tensor, token_ids: Tensor, delta: SiteDelta) -> None:
    """y[t] = rows[i] where token_ids[t] == row_ids[i]."""
    assert delta.row_ids is not None
    indices = torch.searchsorted(delta.row_ids, token_ids).clamp_(max=len(delta.row_ids) - 1)
    is_changed = delta.row_ids[indices] == token_ids
    own = delta.stored_rows.take(indices).to(y.dtype)
    torch.where(is_changed[:, None], own, y, out=y)


def shrink(x: Tensor, a: Sequence[Tile], num_rows: int) -> Tensor:
    """x A^T, float32 `[n, num_rows]`, where A has that many rows."""
    wide = x.float()
    if len(a) == 1:
        return wide @ a[0].data.float().T
    shrunk = torch.zeros(len(x), num_rows, dtype=torch.float32, device=x.device)
    for tile in a:
        _shrink_tile(shrunk, wide, tile)
    return shrunk


def _shrink_tile(shrunk: Tensor, x: Tensor, tile: Tile) -> None:
    """Add the products of float32 rows with a tile. Mutates shrunk."""
    columns = x[:, tile.col_begin : tile.col_end]
    shrunk[:, tile.row_begin : tile.row_end].addmm_(columns, tile.data.float().T)


def look_up(token_ids: Tensor, delta: SiteDelta) -> Tensor:
    """Rows of A^T, float32 `[n, rank]`."""
    if not delta.a:
        return torch.zeros(len(token_ids), 0, device=token_ids.device)
    stored = delta.stored_a
    rows = stored.take(token_ids.clamp(max=stored.num_rows - 1)).float()
    return rows.masked_fill_((token_ids >= stored.num_rows)[:, None], 0.0)


def expand(y: Tensor, shrunk: Tensor, delta: SiteDelta, coef: float) -> None:
    """y += coef * scale * shrunk B. Mutates both."""
    shrunk.mul_(delta.scales)
    if coef != 1.0:
        shrunk.mul_(coef)
    for tile in delta.b:
        part = shrunk[:, tile.row_begin : tile.row_end]
        out = y[:, tile.col_begin : tile.col_end]
        if y.dtype is torch.float32:
            out.addmm_(part, tile.data.float())
        else:
            out.add_(part @ tile.data.float())


def apply_vectors(y: Tensor, delta: SiteDelta, coef: float) -> None:
    """y = gain * (y + coef * lora bias) + bias delta, where the adapter has them. Mutates y."""
    for tile in delta.lora_biases:
        y[:, tile.col_begin : tile.col_end].add_(tile.data, alpha=coef)
    for tile in delta.gains:
        y[:, tile.col_begin : tile.col_end].mul_(tile.data)
    for tile in delta.biases:
        y[:, tile.col_begin : tile.col_end].add_(tile.data)
