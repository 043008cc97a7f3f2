"""Copies images into the arena and keeps the tables that kernels read.

`AdapterCache` decides which adapter gets which slot and extents.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.adapter_format.rope_scaling import parse
from loraplex_services.worker.adapters.device.copy_events import CopyEvents
from loraplex_services.worker.adapters.device.pinned_cache import PinnedCache
from loraplex_services.worker.adapters.device.table import AdapterTable
from loraplex_services.worker.adapters.pack.image import Image, ImageIndex
from loraplex_services.worker.arena_buffer import ArenaBuffer
from loraplex_services.worker.layers.ropes import Ropes
from loraplex_services.worker.types.extents import extent_lengths
from loraplex_services.worker.types.own_rope import BaseRopes, own_ropes


class AdapterWeights:
    """The adapters of one base on one device."""

    def __init__(
        self,
        arena: ArenaBuffer,
        max_resident: int,
        ropes: Ropes,
        base_ropes: BaseRopes,
        host: PinnedCache | None = None,
    ) -> None:
        """
        Args:
            ropes: of the model, where adapters' own, made from `base_ropes`, have rows.
            host: what copies go through; None = from the page cache straight into the arena.
        """
        self.table = AdapterTable(arena)
        self._arena = arena
        self._max_resident = max_resident
        self._ropes = ropes
        self._base_ropes = base_ropes
        ropes.reserve(max_resident)
        self._host = host

    @property
    def pages_per_block(self) -> int:
        """Pages that a block of the arena is divided into."""
        return self._arena.pages_per_block

    @property
    def stall_s(self) -> float:
        """Seconds for which steps have waited for unfinished copies."""
        return 0.0 if self._host is None else self._host.stalls.total_s

    def copy(
        self, image: Image, first_pages: Sequence[int], step_s: float = 0.0
    ) -> tuple[CopyEvents | None, float]:
        """Fill the extents at `first_pages`, which no step in flight reads. From any one thread,
        during steps.

        Raises and returns as `PinnedCache.copy` does.
        """
        if self._host is not None:
            return self._host.copy(image, first_pages, step_s)
        index = image.index
        lengths = extent_lengths(index.num_pages, index.num_bytes, self._arena.block_bytes)
        whole = self._arena.data.view(-1).numpy().data
        starts = [first_page * self._arena.page_bytes for first_page in first_pages]
        image.read_into([whole[s : s + n] for s, n in zip(starts, lengths, strict=True)])
        return None, 0.0

    def enter(self, slot: int, index: ImageIndex, first_pages: Sequence[int]) -> None:
        """Enter what was copied to `first_pages` under `slot`."""
        assert 0 <= slot < self._max_resident, (slot, self._max_resident)
        self.table.enter(slot, index, first_pages)
        if index.facts.rope_scaling:
            self._ropes.enter(slot, own_ropes(self._base_ropes, parse(index.facts.rope_scaling)))

    def unload(self, slot: int) -> None:
        """Take `slot` out of the tables; its pages may be reused at once."""
        self.table.remove(slot)
        self._ropes.remove(slot)
