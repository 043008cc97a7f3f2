"""The arena's bytes: one tensor of equal blocks that KV cache and adapters share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loraplex.errors import InvalidRequest
from loraplex_services.worker.cache.kv_layout import (
    MAX_BLOCK_BYTES,
    TOKENS_PER_BLOCK,
    KvGroup,
    KvGroups,
)
from loraplex_services.worker.cache.state_layout import StateLayout
from loraplex_services.worker.native.pages import PAGE_BYTES, huge_pages, provide
from loraplex_services.worker.types.extents import count_pages_per_block

AHEAD_BYTES = 16 << 20
"""Bytes that the system provides ahead of the writes. Several adapters fit into them."""


class ArenaBuffer:
    """uint8 `[num_blocks, block_bytes]`, its start aligned to 2 MiB, never reallocated."""

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        num_bytes = num_blocks * block_bytes
        if device.type == "cpu":
            raw = huge_pages(num_bytes)
        else:
            raw = torch.empty(num_bytes + MAX_BLOCK_BYTES, dtype=torch.uint8, device=device)
        begin = -raw.data_ptr() % MAX_BLOCK_BYTES
        self.data = raw[begin : begin + num_bytes].view(num_blocks, block_bytes)
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.pages_per_block = count_pages_per_block(block_bytes)
        self.page_bytes = block_bytes // self.pages_per_block
        self._flat: dict[torch.dtype, Tensor] = {}
        self._provided_bytes = 0
        self.provide_after(0)

    def provide_after(self, position: int) -> None:
        """On a CPU, make the system provide the memory that follows a byte before it is written: at
        first, blocks are allocated in ascending order."""
        end = min(position + AHEAD_BYTES, self.data.nbytes)
        begin = max(position - position % PAGE_BYTES, self._provided_bytes)
        if self.data.device.type == "cpu" and begin < end:
            self._provided_bytes = min(end + -end % PAGE_BYTES, self.data.nbytes)
            provide(self.data.view(-1)[begin : self._provided_bytes])

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All bytes as one vector of `dtype`; shares memory."""
        if dtype not in self._flat:
            self._flat[dtype] = self.data.view(-1).view(dtype)
        return self._flat[dtype]


def blocks_for(arena_bytes: int, block_bytes: int) -> int:
    """How many blocks fit.

    Raises:
        InvalidRequest: if fewer than two blocks fit.
    """
    num_blocks = arena_bytes // block_bytes
    if num_blocks < 2:
        description = f"must hold at least two blocks of {block_bytes} bytes for this base"
        raise InvalidRequest.field("kv_memory", arena_bytes, description)
    return num_blocks


SCALE_DTYPE = torch.bfloat16
"""dtype of the scales of codes: it has the range of the model's dtypes."""


class KvBuffer:
    """Views of the arena as the KV cache of each layer, and where it keeps recurrent states."""

    def __init__(
        self,
        arena: ArenaBuffer,
        groups: KvGroups,
        dtype: torch.dtype,
        codes: torch.dtype | None = None,
        states: StateLayout | None = None,
    ) -> None:
        """
        Args:
            codes: what K and V are stored as; None = in `dtype`, without scales.
            states: of the base's recurrent layers, if it has any.
        """
        assert arena.block_bytes == groups.block_bytes, (arena.block_bytes, groups.block_bytes)
        assert (codes is None) == (groups.scale_bytes == 0), (codes, groups.scale_bytes)
        self.arena = arena
        self.groups = groups
        self.tokens_per_block = TOKENS_PER_BLOCK
        self.dtype = dtype
        self.states = states
        self._stored = codes or dtype
        self._planes: dict[int, tuple[Tensor, Tensor]] = {}
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}
        self._group_of: dict[int, int] = {}
        for group_id, group in enumerate(groups.groups):
            num_bytes = groups.plane_bytes(group.heads)
            used = arena.data[:, : 2 * len(group.layers) * num_bytes]
            planes = used.unflatten(1, (-1, num_bytes))
            for index, layer in enumerate(group.layers):
                both = planes[:, 2 * index], planes[:, 2 * index + 1]
                self._planes[layer] = self._items(both[0], group), self._items(both[1], group)
                if groups.scale_bytes:
                    scales = (self._own_scales(plane, group) for plane in both)
                    self._scales[layer] = next(scales), next(scales)
                self._group_of[layer] = group_id

    def _items(self, plane: Tensor, group: KvGroup) -> Tensor:
        """Keys or values of uint8 `[num_blocks, plane_bytes]`."""
        shape = group.heads.count, TOKENS_PER_BLOCK, group.heads.dim
        num_bytes = math.prod(shape) * self._stored.itemsize
        items = plane[:, :num_bytes].view(self._stored)
        return items.view(len(plane), *shape)

    def _own_scales(self, plane: Tensor, group: KvGroup) -> Tensor:
        """Their scales."""
        shape = group.heads.count, TOKENS_PER_BLOCK
        scales = plane[:, -math.prod(shape) * SCALE_DTYPE.itemsize :]
        return scales.view(SCALE_DTYPE).view(len(plane), *shape)

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer in every block, `[num_blocks, Hkv, T, D]`; codes if it has scales."""
        return self._planes[layer]

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The scales of the codes of K and V of a layer, each `[num_blocks, Hkv, T]`;
        None if they have the model's dtype."""
        return self._scales.get(layer)

    def group_of(self, layer: int) -> int:
        """KV group of a layer."""
        return self._group_of[layer]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each KV group."""
        return self.groups.windows

    @property
    def num_kv_heads(self) -> int:
        """Key heads of the layer that has the fewest."""
        return min(group.heads.count for group in self.groups.groups)
