"""The gated delta net in C++, token by token: `native/src/recurrence.cpp`."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from loraplex_services.worker.cache.state_layout import StateLayout
from loraplex_services.worker.native.bindings import Native, row_stride
from loraplex_services.worker.ops.recurrence.backend import DeltaWeights, StateBatch
from loraplex_services.worker.types.model_config import RecurrenceConfig


class NativeDeltaNet:
    """Implements `DeltaNet`."""

    def __init__(
        self, native: Native, config: RecurrenceConfig, state_index: int, weights: DeltaWeights
    ) -> None:
        """`state_index`: of the layer among those with a state."""
        self._native = native
        self._config = config
        self._state_index = state_index
        self._taps = weights.taps.T.contiguous()
        self._weights = weights
        self._shape: Tensor | None = None
        """The shape as the kernel reads it. It is kept, because programs hold its address."""

    def forward(self, qkv: Tensor, a: Tensor, b: Tensor, states: StateBatch) -> Tensor:
        """See `DeltaNet`; rows of qkv, a, b may lie apart."""
        weights = self._taps, self._weights.rates, self._weights.step_bias
        tables = states.sources, states.targets, states.words, states.row_ends
        assert all(x.dtype is torch.float32 and x.is_contiguous() for x in weights)
        assert all(x.dtype is torch.int64 and x.is_contiguous() for x in tables)
        if self._shape is None:
            self._shape = self._shape_of(states.layout)
        mixed = torch.empty(qkv.shape, dtype=torch.float32)
        y = torch.empty(len(qkv), self._config.values_size, dtype=qkv.dtype)
        outputs = mixed, y, states.cells
        rows = qkv, row_stride(qkv), a, row_stride(a), b, row_stride(b), qkv.dtype
        vectors = *weights, *outputs, self._shape, *tables
        self._native.call("delta_net", *rows, *vectors, len(states.row_ends))
        return y

    def _shape_of(self, cells: StateLayout) -> Tensor:
        config = self._config
        words = struct.pack(
            "10q",
            config.num_key_heads,
            config.num_value_heads,
            config.key_dim,
            config.value_dim,
            config.kernel_size,
            self._state_index * cells.layer_cells,
            cells.cell_items,
            cells.block_cells,
            cells.block_items,
            cells.num_blocks,
        )
        return torch.frombuffer(bytearray(words), dtype=torch.int64)
