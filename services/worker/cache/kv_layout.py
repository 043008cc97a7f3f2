"""How KV and adapters share equal blocks: which layers a block holds. No tensors.

Layers are split into KV groups of one attention kind (full, or one window) and of equal size, the
largest for which a block of 16 tokens stays within 2 MiB. A block holds 16 tokens of all layers of
its group: layer-major, K then V, each `[Hkv, T, D]`. With an int8 cache, `[Hkv, T]` scales follow
each of the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

TOKENS_PER_BLOCK = 16
MAX_BLOCK_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share block tables."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class KvGroups:
    """All groups of a model and the block they agree on."""

    groups: tuple[KvGroup, ...]
    num_kv_heads: int
    head_dim: int
    itemsize: int
    scale_bytes: int = 0
    """Bytes of the scale of each token and head, behind a layer's K and behind its V; 0 = none."""

    @property
    def plane_items(self) -> int:
        """Elements of K (or of V) of one layer in a block."""
        return self.num_kv_heads * TOKENS_PER_BLOCK * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of every block of the arena."""
        return 2 * len(self.groups[0].layers) * self.plane_bytes

    @property
    def plane_bytes(self) -> int:
        """Bytes of K (or of V) of one layer in a block, with their scales."""
        num_scales = self.num_kv_heads * TOKENS_PER_BLOCK
        return self.plane_items * self.itemsize + num_scales * self.scale_bytes

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each group."""
        return tuple(group.window for group in self.groups)


def plan_kv_groups(
    windows: Sequence[int | None],
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    without_kv: Collection[int] = (),
    scale_bytes: int = 0,
) -> KvGroups:
    """Split layers, whose windows are given, into groups; some layers may have no KV."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        if layer not in without_kv:
            kinds.setdefault(window, []).append(layer)
    layer_bytes = 2 * num_kv_heads * TOKENS_PER_BLOCK * (head_dim * itemsize + scale_bytes)
    common = math.gcd(*(len(layers) for layers in kinds.values()))
    size = max(
        (n for n in range(1, common + 1) if common % n == 0 and n * layer_bytes <= MAX_BLOCK_BYTES),
        default=1,
    )
    groups = tuple(
        KvGroup(tuple(layers[begin : begin + size]), window)
        for window, layers in kinds.items()
        for begin in range(0, len(layers), size)
    )
    return KvGroups(groups, num_kv_heads, head_dim, itemsize, scale_bytes)
