"""Computes the rows of a base's weights with adapters merged into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.adapter_format.report import AdapterModule
from loraplex.adapter_format.safetensors_header import TensorInfo
from loraplex.rewriting.checkpoint import RowsOf, TensorLocation
from loraplex.rewriting.tensors import Array, Opened

COLUMN_CHUNK_ROWS = 8192
"""Number of rows of a table that are in memory at once."""


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """The tensors of one adapter for one module."""

    adapter: Opened
    module: AdapterModule
    weight: float

    @property
    def factor(self) -> np.float32:
        """The adapter's weight times the module's scale."""
        return np.float32(self.weight * self.module.scale)

    def source(self, info: TensorInfo) -> TensorLocation:
        """A tensor of the adapter, to be read by rows."""
        return TensorLocation(self.adapter.content.tensor_path, info)


def merged_rows(
    shares: Sequence[ModuleShare], source: TensorLocation, offset: int, *, is_table: bool
) -> RowsOf:
    """A function that computes rows of a merged weight, without DoRA's gain on a table.

    Args:
        source: the base's weight.
        offset: row of the adapter's module at which the weight begins.
        is_table: whether it is the embedding, whose LoRA matrices are transposed.
    """
    first = shares[0]
    replaced = first.module.full or first.module.base_copy
    own = first.source(replaced) if replaced is not None else source
    tokens = _token_rows(first)
    pairs = [(share, *share.adapter.pair(share.module)) for share in shares if share.module.rank]

    def rows(begin: int, end: int) -> Array:
        total = own.rows(begin, end)
        missing = end - begin - len(total)
        if missing > 0:
            total = np.concatenate([total, np.zeros((missing, *total.shape[1:]), np.float32)])
        for token_id, row in tokens.items():
            if begin <= token_id < end:
                total[token_id - begin] = row
        for share, a, b in pairs:
            if is_table:
                total += share.factor * (a[:, begin:end].T @ b.T)
            else:
                total += share.factor * (b[offset + begin : offset + end] @ a)
        if first.module.magnitude is not None and not is_table:
            magnitude = first.adapter.tensor(first.module.magnitude).reshape(-1)
            norms = np.linalg.norm(total, axis=1)
            total *= (magnitude[offset + begin : offset + end] / norms)[:, None]
        return total

    return rows


def with_column_gain(shares: Sequence[ModuleShare], rows: RowsOf, num_rows: int) -> RowsOf:
    """A function that computes rows of an embedding with DoRA's gain, one factor for each column.
    Reads all rows once, for the norms of the columns."""
    info = shares[0].module.magnitude
    if info is None:
        return rows
    squares: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | float = 0.0
    for begin in range(0, num_rows, COLUMN_CHUNK_ROWS):
        chunk = rows(begin, min(begin + COLUMN_CHUNK_ROWS, num_rows))
        squares = squares + np.square(chunk, dtype=np.float64).sum(axis=0)
    magnitude = shares[0].adapter.tensor(info).reshape(-1)
    gain = (magnitude / np.sqrt(squares)).astype(np.float32)
    return lambda begin, end: rows(begin, end) * gain


def _token_rows(share: ModuleShare) -> dict[int, Array]:
    info = share.module.token_delta
    if info is None:
        return {}
    return dict(zip(share.module.token_ids, share.adapter.tensor(info), strict=True))
