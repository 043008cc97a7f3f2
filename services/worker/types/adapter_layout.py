"""The facts that an adapter's image depends on besides the adapter: base, types and blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from loraplex_services.worker.types.extents import count_pages_per_block, extent_begins
from loraplex_services.worker.types.own_rope import BaseRopes
from loraplex_services.worker.types.sharding import ONLY, Shard
from loraplex_services.worker.types.sites import LINEAR, LM_HEAD, SiteTable

IMAGE_VERSION = 7
"""Version of the image format and of the arithmetic that fills images; raised with every change of
either."""
HALF_DTYPES = ("BF16", "F16")


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Plain data, so that packing processes can receive it. Types as safetensors names."""

    block_bytes: int
    dtype: str
    """The model's dtype: F32, BF16 or F16."""
    keeps_half: bool
    """Whether A and B that were published in half precision stay so under a float32 model, whose
    kernels widen them: exact, and half the bytes."""
    max_rank: int
    """Adapters of a higher rank are refused."""
    base_key: str
    """Names the base's geometry and weights, on which DoRA's gains depend."""
    sites: SiteTable
    ropes: BaseRopes
    """The base's rotary embeddings, from which an adapter's own are made."""
    stored: str = "auto"
    """The type in which A and B are kept, whatever they were published in; I8 = A and B of linears
    and the head become integers with a factor for each rank row, and the rest is as with auto."""
    shard: Shard = ONLY
    """The tensor-parallel rank for which images are packed; `sites` is the table of the whole
    base."""

    @property
    def int8(self) -> bool:
        """Whether A and B are integers."""
        return self.stored == "I8"

    @property
    def ranks(self) -> tuple[AdapterLayout, ...]:
        """The layouts of all ranks. An adapter is packed for each of them."""
        size = self.shard.size
        return tuple(replace(self, shard=Shard(rank, size)) for rank in range(size))

    @property
    def pages_per_block(self) -> int:
        """Pages that a block of the arena is divided into."""
        return count_pages_per_block(self.block_bytes)

    def extent_begins(self, num_pages: int) -> list[int]:
        """Byte offset of each extent of `num_pages` in an image."""
        page_bytes = self.block_bytes // self.pages_per_block
        return [page * page_bytes for page in extent_begins(num_pages, self.pages_per_block)]

    def lora_dtype(self, published: str, site_kind: str) -> str:
        """The dtype in which A and B are packed."""
        if self.int8 and site_kind in (LINEAR, LM_HEAD):
            return "I8"
        if self.stored not in ("auto", "I8"):
            return self.stored
        keeps = self.keeps_half and self.dtype == "F32" and published in HALF_DTYPES
        return published if keeps else self.dtype

    @property
    def fingerprint(self) -> str:
        """Images with equal fingerprints hold the same bytes for an adapter."""
        sites = (self.sites.sites, sorted(self.sites.modules.items()))
        types = (self.block_bytes, self.dtype, self.keeps_half, self.stored, self.max_rank)
        tokens = self.ropes.max_position_embeddings
        parts = repr((IMAGE_VERSION, types, self.base_key, sites, tokens, self.shard))
        return hashlib.sha256(parts.encode()).hexdigest()[:16]
