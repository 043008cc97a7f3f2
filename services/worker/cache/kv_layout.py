"""The layout of KV cache in arena blocks: which layers a block holds. No tensors.

Layers are split into KV groups of one attention kind (full, or one window) and of one shape. A
block holds 16 tokens of all layers of its group: layer-major, K then V, each `[Hkv, T, D]`. If they
are codes, `[Hkv, T]` scales follow each of the two. A group has the number of layers that fits a
block of 2 MiB and leaves the smallest part of all blocks empty, which is none if all layers have
one shape. Blocks of codes, and of heads of an unusual width, are up to 1.6% larger than their
planes, so that they can be divided into pages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loraplex_services.worker.types.extents import paged_bytes
from loraplex_services.worker.types.model_config import KvHeads

TOKENS_PER_BLOCK = 16
MAX_BLOCK_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share block tables."""

    layers: tuple[int, ...]
    window: int | None
    heads: KvHeads


@dataclass(frozen=True, slots=True)
class KvGroups:
    """All groups of a model, and the block size that they share."""

    groups: tuple[KvGroup, ...]
    block_bytes: int
    """Bytes of every block of the arena; a group may leave the end of its blocks empty."""
    itemsize: int
    scale_bytes: int = 0
    """Bytes of the scale of one token and head, after a layer's K and after its V; 0 = no
    scales."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each group in tokens; None = full attention."""
        return tuple(group.window for group in self.groups)

    def plane_bytes(self, heads: KvHeads) -> int:
        """Bytes of K (or of V) of one layer in a block, with their scales."""
        return _plane_bytes(heads, self.itemsize, self.scale_bytes)


def plan_kv_groups(
    windows: Sequence[int | None],
    heads: Sequence[KvHeads],
    itemsize: int,
    without_kv: Collection[int] = (),
    scale_bytes: int = 0,
) -> KvGroups:
    """Split layers, whose windows and heads are given, into groups; some layers may have no KV."""
    kinds: dict[tuple[int | None, KvHeads], list[int]] = {}
    for layer, kind in enumerate(zip(windows, heads, strict=True)):
        if layer not in without_kv:
            kinds.setdefault(kind, []).append(layer)
    sizes = [2 * _plane_bytes(own, itemsize, scale_bytes) for _, own in kinds]
    counts = [len(layers) for layers in kinds.values()]
    used_bytes = _block_bytes(sizes, counts)
    groups = tuple(
        KvGroup(tuple(layers[begin : begin + used_bytes // size]), window, own)
        for ((window, own), layers), size in zip(kinds.items(), sizes, strict=True)
        for begin in range(0, len(layers), used_bytes // size)
    )
    return KvGroups(groups, paged_bytes(used_bytes), itemsize, scale_bytes)


def _plane_bytes(heads: KvHeads, itemsize: int, scale_bytes: int) -> int:
    return heads.count * TOKENS_PER_BLOCK * (heads.dim * itemsize + scale_bytes)


def _block_bytes(sizes: Sequence[int], counts: Sequence[int]) -> int:
    """The block size in bytes with which `counts` layers of `sizes` bytes take the fewest bytes; of
    several such sizes, the largest."""
    least = max(sizes)  # a block holds a whole layer
    most = max(least, MAX_BLOCK_BYTES)
    candidates = {
        num * size
        for size, count in zip(sizes, counts, strict=True)
        for num in range(1, count + 1)
        if least <= num * size <= most
    }

    def total_bytes(block_bytes: int) -> int:
        pairs = zip(sizes, counts, strict=True)
        return block_bytes * sum(-(-count // (block_bytes // size)) for size, count in pairs)

    return min(candidates, key=lambda block_bytes: (total_bytes(block_bytes), -block_bytes))
