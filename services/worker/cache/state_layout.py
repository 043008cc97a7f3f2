"""The layout of the recurrent state of a sequence in blocks of the arena. No tensors.

A layer keeps one matrix for each of its heads, and the last inputs of its convolution. They are cut
into cells of equal size: one for each head, and as many as the convolution's inputs fill. A block
holds as many whole cells as fit, so that no cell needs two adjacent blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.errors import Unsupported
from loraplex_services.worker.types.model_config import ModelConfig, RecurrenceConfig

STATE_BYTES = 4
"""Bytes of an item: states are float32, whatever the model's dtype."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The cells of one sequence, layer by layer: in each layer first those of the heads, then those
    of the convolution."""

    num_layers: int
    num_heads: int
    cell_items: int
    conv_items: int
    """Number of items of one layer's convolution."""
    block_items: int

    @property
    def conv_cells(self) -> int:
        """Number of cells of one layer's convolution."""
        return -(-self.conv_items // self.cell_items)

    @property
    def layer_cells(self) -> int:
        """Number of cells of one layer."""
        return self.num_heads + self.conv_cells

    @property
    def block_cells(self) -> int:
        """Number of cells that fit in a block."""
        return self.block_items // self.cell_items

    @property
    def num_cells(self) -> int:
        """Number of cells of one sequence."""
        return self.num_layers * self.layer_cells

    @property
    def num_blocks(self) -> int:
        """Number of blocks of one sequence."""
        return -(-self.num_cells // self.block_cells)


def state_layout(config: ModelConfig, block_bytes: int) -> StateLayout | None:
    """The layout of a base's states, if it has any. Raises as `plan_state` does."""
    return None if config.recurrence is None else plan_state(config.recurrence, block_bytes)


def plan_state(recurrence: RecurrenceConfig, block_bytes: int) -> StateLayout:
    """The layout in blocks of this size.

    Raises:
        Unsupported: a block is smaller than the state of one head.
    """
    layout = StateLayout(
        num_layers=len(recurrence.layers),
        num_heads=recurrence.num_value_heads,
        cell_items=recurrence.key_dim * recurrence.value_dim,
        conv_items=recurrence.conv_size * (recurrence.kernel_size - 1),
        block_items=block_bytes // STATE_BYTES,
    )
    if layout.block_cells == 0:
        why = f"a head's state must fit in a block of the arena, which has {block_bytes} bytes"
        raise Unsupported.field("config.json:linear_key_head_dim", recurrence.key_dim, why)
    return layout
