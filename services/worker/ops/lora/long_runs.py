"""The low-rank update of long runs on GPUs, in tiles of rows that use one adapter each.

The tokens of a prompt use one adapter. A tile of theirs has no rows of other adapters, which would
need zeros in the intermediate, so it may be larger than the tiles of `triton.py`, and it finds its
groups in the tables without lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_services.worker.ops.launch import must_widen, num_programs
from loraplex_services.worker.ops.lora import triton_long as kernels
from loraplex_services.worker.ops.lora.device_records import GROUP_ROWS, MAX_PARTS, float_bits
from loraplex_services.worker.ops.lora.device_tables import (
    ALIGNED_ELEMENTS,
    DeviceTables,
    SiteShape,
)
from loraplex_services.worker.ops.lora.runs import LONG_MIN_ROWS, RowRun
from loraplex_services.worker.transfers import to_device

BLOCK_ROWS = 64
"""Token rows of a tile."""
BLOCK_RANKS = 64
"""Rank rows of a block of the intermediate, which a program of the first launch computes."""
SPLIT_INPUTS = 1024
"""Inputs of one partial sum of the intermediate, in every step."""
TILE_WORDS = kernels.LONG_WORDS.value
MAX_CHUNKS = 4
"""Programs of the first launch that share the rank rows of a tile, at most."""
SHRINK_PROGRAMS, EXPAND_PROGRAMS = 4, 4
"""Programs of each launch for each multiprocessor, at most."""
GRAPH_GROUPS_OF_A_PART = 2
"""Groups of an adapter for which the first launch of captured steps is divided."""
MAX_REGISTERS = 128
"""Registers of a thread, so that a multiprocessor runs four programs."""
MAX_SPAN_BLOCKS = 4
"""Blocks of outputs that a program of the second launch computes one after another, at most."""
GRAPH_BLOCKS = 128
"""Blocks that the tiles of a step may have in a part so that a captured graph can hold them: those
of 1,024 rows and rank 256."""


class LongWork:
    """Tiles of a step's long runs, and the workspace of their updates."""

    def __init__(
        self, tables: DeviceTables, tiles: Tensor, num_blocks: int, num_groups: int
    ) -> None:
        """
        Args:
            tiles: int32 `[1 + most tiles, TILE_WORDS]` on the device: `tile_words`.
            num_blocks: of all tiles in a part, at most.
            num_groups: of an adapter in a part, for which the first launch is divided.
        """
        device, numbers = tables.arena.device, num_blocks * BLOCK_ROWS * BLOCK_RANKS
        self.tables, self.tiles, self._num_groups = tables, tiles, num_groups
        num_sums = (_num_splits(shape.num_inputs) * len(shape.parts) for shape in tables.shapes)
        self.partial = torch.empty(max(num_sums) * numbers, dtype=torch.float32, device=device)
        self.intermediate = torch.empty(
            tables.max_parts * numbers, dtype=torch.float32, device=device
        )
        self.tickets = torch.zeros(tables.max_parts * num_blocks, dtype=torch.int32, device=device)

    def shrink(self, x: Tensor, site_id: int) -> None:
        """Compute the intermediates of a site for x `[T, in]`."""
        tables, shape = self.tables, self.tables.shapes[site_id]
        assert x.stride(1) == 1 and x.shape[1] == shape.num_inputs, (x.shape, x.stride(), shape)
        splits = _num_splits(shape.num_inputs)
        num_ranks = len(shape.parts) * self._num_groups * GROUP_ROWS
        num_chunks = min(MAX_CHUNKS, -(-num_ranks // BLOCK_RANKS))
        most = num_programs(x.device, SHRINK_PROGRAMS)
        kernels.shrink_long[(min(self._max_tiles * splits * num_chunks, most),)](
            x,
            tables.matrices,
            self.partial,
            self.intermediate,
            self.tickets,
            self.tiles,
            tables.index,
            tables.records,
            tables.first_part[site_id],
            len(tables.parts),
            x.shape[1],
            x.stride(0),
            num_chunks,
            **shrink_constants(shape, x.dtype, tables.is_int8),
        )

    def expand(self, y: Tensor, site_id: int) -> None:
        """Add B times the intermediates of a site to the rows of y `[T, out]`."""
        tables, shape = self.tables, self.tables.shapes[site_id]
        assert y.stride(1) == 1, y.stride()
        ends = [part.end for part in shape.parts]
        constants = expand_constants(shape, y.dtype, tables.is_int8)
        most = num_programs(y.device, EXPAND_PROGRAMS)
        num_tiles, block = -(-len(y) // BLOCK_ROWS), constants["BLOCK_OUTPUTS"]
        span = block * min(MAX_SPAN_BLOCKS, max(1, num_tiles * ends[-1] // (block * most)))
        num_spans = sum(-(-part.length // span) for part in shape.parts)
        kernels.expand_long[(min(self._max_tiles * num_spans, most),)](
            y,
            tables.matrices,
            tables.vectors,
            self.intermediate,
            self.tiles,
            tables.index,
            tables.records,
            tables.first_part[site_id],
            len(tables.parts),
            *ends,
            *[ends[-1]] * (MAX_PARTS - len(ends)),
            y.stride(0),
            span,
            **constants,
        )

    @property
    def _max_tiles(self) -> int:
        return max(1, len(self.tiles) - 1)


def make_long_work(tables: DeviceTables, runs: Sequence[RowRun]) -> LongWork:
    """The work of a step's long runs."""
    tiles = to_device(torch.from_numpy(tile_words(tables, runs)), tables.arena.device)
    num_groups = max((tables.entered(run.slot).max_groups for run in runs), default=1)
    return LongWork(tables, tiles, max(1, num_blocks(tables, runs)), max(1, num_groups))


def static_long_work(tables: DeviceTables, tiles: Tensor) -> LongWork:
    """The work of all captured steps, whose tiles are in `tiles`."""
    return LongWork(tables, tiles, GRAPH_BLOCKS, GRAPH_GROUPS_OF_A_PART)


def fits_static_long_work(tables: DeviceTables, runs: Sequence[RowRun]) -> bool:
    """Whether these runs fit the blocks of captured steps."""
    return num_blocks(tables, runs) <= GRAPH_BLOCKS


def max_tiles(num_rows: int) -> int:
    """Most tiles that the long runs of `num_rows` rows have: a run's last one may be smaller."""
    return num_rows // BLOCK_ROWS + num_rows // LONG_MIN_ROWS


def num_blocks(tables: DeviceTables, runs: Sequence[RowRun]) -> int:
    """Blocks of all tiles in a part."""
    return sum(_num_tiles(run) * _tile_blocks(tables, run) for run in runs)


def tile_words(tables: DeviceTables, runs: Sequence[RowRun]) -> NDArray[np.int32]:
    """`[1 + tiles, TILE_WORDS]`: the number of tiles, then slot, first row, end row, bits of the
    coefficient and first block of each."""
    words, block = [(0,) * TILE_WORDS], 0
    for run in runs:
        blocks = _tile_blocks(tables, run)
        for begin in range(run.begin, run.end, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, run.end)
            words.append((run.slot, begin, end, float_bits(run.coef), block, 0, 0, 0))
            block += blocks
    array = np.array(words, np.int32)
    array[0, 0] = len(words) - 1
    return array


def _num_splits(num_inputs: int) -> int:
    return -(-num_inputs // SPLIT_INPUTS)


def _num_tiles(run: RowRun) -> int:
    return -(-(run.end - run.begin) // BLOCK_ROWS)


def _tile_blocks(tables: DeviceTables, run: RowRun) -> int:
    """Blocks of a tile in each part: those of the part where the adapter has most groups."""
    return max(1, -(-tables.entered(run.slot).max_groups * GROUP_ROWS // BLOCK_RANKS))


def shrink_constants(shape: SiteShape, dtype: torch.dtype, is_int8: bool) -> dict[str, Any]:
    """The compile-time constants of `shrink_long`; `dtype` is that of x."""
    is_half = dtype.itemsize < 4
    return {
        "SPLITS": _num_splits(shape.num_inputs),
        "SPLIT_INPUTS": SPLIT_INPUTS,
        "BLOCK_RANKS": BLOCK_RANKS,
        "BLOCK_INPUTS": 64 if is_half else 32,
        "INT8": is_int8,
        **_constants(shape, dtype, is_int8),
    }


def expand_constants(shape: SiteShape, dtype: torch.dtype, is_int8: bool) -> dict[str, Any]:
    """The compile-time constants of `expand_long`; `dtype` is that of y."""
    is_half = dtype.itemsize < 4
    return {
        "BLOCK_OUTPUTS": 64 if is_half and not shape.may_be_cut else 32,
        "H_RANKS": BLOCK_RANKS,
        **_constants(shape, dtype, is_int8),
    }


def _constants(shape: SiteShape, dtype: torch.dtype, is_int8: bool) -> dict[str, Any]:
    is_half = dtype.itemsize < 4
    return {
        "NUM_PARTS": len(shape.parts),
        "BLOCK_ROWS": BLOCK_ROWS,
        # No tile of integers is copied ahead: for sm_80 Triton 3.7.1 cannot compile that.
        "STAGES": 1 if is_int8 else 3 if is_half else 2,
        "HAS_CUTS": shape.may_be_cut,
        "WIDEN": must_widen(dtype),
        "ALIGN": ALIGNED_ELEMENTS if shape.is_aligned else 1,
        "num_warps": 4,
        "maxnreg": MAX_REGISTERS if is_half and not shape.may_be_cut else None,
    }
