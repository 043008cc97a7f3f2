"""The gated delta net by Triton kernels: steps of single tokens, and prompts in chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from loraplex_services.worker.cache.state_layout import StateLayout
from loraplex_services.worker.ops.launch import power_of_two
from loraplex_services.worker.ops.recurrence import triton_kernels as kernels
from loraplex_services.worker.ops.recurrence.backend import DeltaWeights, StateBatch
from loraplex_services.worker.types.model_config import RecurrenceConfig

CONV_TOKENS, CONV_CHANNELS = 32, 64
"""Tile of the convolution of a prompt."""
STEP_CHANNELS = 256
"""Channels of a program of the convolution of one token."""
STEP_VALUES = 32
"""Columns of a state that one program of a single token advances."""
MIN_DOT = 16
"""The smallest side of a product of tiles."""


@dataclass(frozen=True, slots=True)
class ChunkTiling:
    """Sizes of the tiles of prompts: the largest whose programs keep a state of 128 rows in
    registers."""

    chunk_tokens: int
    block_values: int
    """Columns of a state that one program advances."""
    num_warps: int
    precision: str
    """How tiles are multiplied: on tensor cores with 10 bits of fraction, or in float32."""


TILING_HALF = ChunkTiling(32, 16, 4, "tf32")
TILING_FLOAT32 = ChunkTiling(16, 16, 8, "ieee")


def tiling_for(dtype: torch.dtype) -> ChunkTiling:
    """The tiling for a model's dtype."""
    return TILING_FLOAT32 if dtype is torch.float32 else TILING_HALF


class TritonDeltaNet:
    """Implements `DeltaNet`."""

    def __init__(self, config: RecurrenceConfig, state_index: int, weights: DeltaWeights) -> None:
        """`state_index`: of the layer among those with a state."""
        self._config = config
        self._state_index = state_index
        self._weights = weights

    def forward(self, qkv: Tensor, a: Tensor, b: Tensor, states: StateBatch) -> Tensor:
        """See `DeltaNet`; rows of qkv, a, b may lie apart."""
        assert all(x.stride(-1) == 1 for x in (qkv, a, b)), "columns are neighbours"
        config = self._config
        mixed = torch.empty(qkv.shape, dtype=torch.float32, device=qkv.device)
        out = torch.empty(len(qkv), config.values_size, dtype=qkv.dtype, device=qkv.device)
        num_others = len(states.row_ends) - states.num_single
        if num_others:
            self._convolve(mixed, qkv, states, 0, num_others, CONV_TOKENS, CONV_CHANNELS)
            self._advance(out, mixed, a, b, states, num_others)
        if states.num_single:
            self._convolve(mixed, qkv, states, num_others, states.num_single, 1, STEP_CHANNELS)
            self._step(out, mixed, a, b, states)
        return out

    def _convolve(
        self,
        mixed: Tensor,
        qkv: Tensor,
        states: StateBatch,
        first_row: int,
        num_rows: int,
        block_tokens: int,
        block_channels: int,
    ) -> None:
        config = self._config
        grid = num_rows, triton.cdiv(config.conv_size, block_channels)
        kernels.convolve[grid](
            mixed,
            qkv,
            self._weights.taps,
            states.cells,
            states.row_ends,
            states.words,
            states.sources,
            states.targets,
            first_row,
            self._first_cell(states.layout) + config.num_value_heads,
            qkv.stride(0),
            CHANNELS=config.conv_size,
            NUM_TAPS=config.kernel_size,
            BLOCK_TAPS=power_of_two(max(config.kernel_size - 1, 1)),
            CELL_ITEMS=states.layout.cell_items,
            BLOCK_TOKENS=block_tokens,
            BLOCK_CHANNELS=block_channels,
            **block_sizes(states.layout),
        )

    def _step(self, out: Tensor, mixed: Tensor, a: Tensor, b: Tensor, states: StateBatch) -> None:
        config, block_values = self._config, STEP_VALUES
        blocks = triton.cdiv(config.value_dim, block_values)
        kernels.step[(blocks, config.num_value_heads, states.num_single)](
            out,
            mixed,
            *self._gates(a, b),
            states.cells,
            states.words,
            states.sources,
            states.targets,
            len(states.words) - states.num_single,
            self._first_cell(states.layout),
            a.stride(0),
            b.stride(0),
            BLOCK_VALUES=block_values,
            **head_sizes(config),
            **block_sizes(states.layout),
        )

    def _advance(
        self, out: Tensor, mixed: Tensor, a: Tensor, b: Tensor, states: StateBatch, num_rows: int
    ) -> None:
        config, tiling = self._config, tiling_for(out.dtype)
        num_heads, chunk = config.num_value_heads, tiling.chunk_tokens
        solutions, weights, scales = (
            torch.empty(len(mixed), num_heads, width, device=mixed.device)
            for width in (chunk, chunk, 2)
        )
        options = {
            "CHUNK": chunk,
            "PRECISION": tiling.precision,
            "num_warps": tiling.num_warps,
            "num_stages": 1,
        }
        num_spans = len(states.words) - states.num_single
        kernels.solve_chunks[(triton.cdiv(states.longest, chunk), num_heads, num_spans)](
            solutions,
            weights,
            scales,
            mixed,
            *self._gates(a, b),
            states.words,
            a.stride(0),
            b.stride(0),
            **head_sizes(config),
            **options,
        )
        blocks = triton.cdiv(config.value_dim, tiling.block_values)
        kernels.advance_chunks[(blocks, num_heads, num_rows)](
            out,
            solutions,
            weights,
            scales,
            mixed,
            *self._gates(a, b),
            states.cells,
            states.row_ends,
            states.words,
            states.sources,
            states.targets,
            self._first_cell(states.layout),
            a.stride(0),
            b.stride(0),
            BLOCK_VALUES=tiling.block_values,
            **head_sizes(config),
            **block_sizes(states.layout),
            **options,
        )

    def _gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a, b, self._weights.rates, self._weights.step_bias

    def _first_cell(self, layout: StateLayout) -> int:
        return self._state_index * layout.layer_cells


def block_sizes(layout: StateLayout) -> dict[str, int]:
    """Constants of the kernels that find cells."""
    return {
        "STATE_BLOCKS": layout.num_blocks,
        "BLOCK_CELLS": layout.block_cells,
        "BLOCK_ITEMS": layout.block_items,
    }


def head_sizes(config: RecurrenceConfig) -> dict[str, int]:
    """Constants of the kernels that compute heads."""
    return {
        "KEY_HEADS": config.num_key_heads,
        "VALUE_HEADS": config.num_value_heads,
        "KEY_DIM": config.key_dim,
        "VALUE_DIM": config.value_dim,
        "BLOCK_KEYS": max(MIN_DOT, power_of_two(config.key_dim)),
    }
