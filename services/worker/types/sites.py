"""The sites of a model, where adapters attach, as one table. Plain data.

A site is where one input meets stacked projections (`qkv`, `o`, `gate_up`, `down`), the
embedding, the head, or a norm. Modules by their Hugging Face names are row ranges of sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from loraplex_services.worker.types.sharding import WHOLE, Cut, Shard, local_range, num_features

LINEAR = "linear"
EMBEDDING = "embedding"
LM_HEAD = "lm_head"
NORM = "norm"
HEAD = "head"
"""A head that only adapters bring, such as that of SEQ_CLS: the base has no outputs there."""
EXPERT = "expert"
"""A linear of one expert: it sees only the rows that the router sends there."""


@dataclass(frozen=True, slots=True)
class Site:
    """One row of the table; `id` is its index."""

    id: int
    layer: int
    """-1 outside the decoder layers."""
    kind: str
    in_features: int
    out_features: int
    cut: Cut = WHOLE
    """How tensor-parallel ranks divide it."""
    divides_both: bool = False
    """Whether they divide both matrices of an adapter's pairs, and not one: see `division`."""

    def on_rank(self, shard: Shard) -> Site:
        """The site as one rank has it."""
        inputs, outputs = shard.spans(self.cut.inputs), shard.spans(self.cut.outputs)
        return replace(
            self,
            in_features=num_features(inputs) or self.in_features,
            out_features=num_features(outputs) or self.out_features,
        )


@dataclass(frozen=True, slots=True)
class SiteRange:
    """Where a module is: rows [out_begin, out_begin + out_features) of its site's weight."""

    site_id: int
    out_begin: int
    out_features: int


@dataclass(frozen=True, slots=True)
class SiteTable:
    """All sites, and the range of each module that adapters may name."""

    sites: tuple[Site, ...]
    modules: Mapping[str, SiteRange]

    def on_rank(self, shard: Shard) -> SiteTable:
        """The table of one rank's part; sites keep their ids."""
        if shard.size == 1:
            return self
        sites = tuple(site.on_rank(shard) for site in self.sites)
        return SiteTable(sites, {n: self._local(p, shard) for n, p in self.modules.items()})

    def _local(self, site_range: SiteRange, shard: Shard) -> SiteRange:
        spans = shard.spans(self.sites[site_range.site_id].cut.outputs)
        if not spans:
            return site_range
        end = site_range.out_begin + site_range.out_features
        return SiteRange(site_range.site_id, *local_range(spans, site_range.out_begin, end))


class Slice(NamedTuple):
    """One module's update at a site: rank rows of the stacked A, and the outputs they reach.

    A site's slices stack the ranks of q, k, v (or gate, up), which may differ or be absent.
    """

    rank_begin: int
    rank_len: int
    out_begin: int
    out_len: int
    scale: float


class SiteTableBuilder:
    """Collects sites while a model is built."""

    def __init__(self) -> None:
        self._sites: list[Site] = []
        self._modules: dict[str, SiteRange] = {}

    def add(
        self,
        layer: int,
        kind: str,
        in_features: int,
        modules: Sequence[tuple[str, int]],
        cut: Cut = WHOLE,
        *,
        divides_both: bool = False,
    ) -> int:
        """Add a site of stacked modules, (name, out_features) each, and return its id."""
        site_id = len(self._sites)
        begin = 0
        for name, out_features in modules:
            assert name not in self._modules, name
            self._modules[name] = SiteRange(site_id, begin, out_features)
            begin += out_features
        self._sites.append(Site(site_id, layer, kind, in_features, begin, cut, divides_both))
        return site_id

    def alias(self, name: str, site_id: int) -> None:
        """Add a name that stands for all modules of a site together."""
        assert name not in self._modules, name
        self._modules[name] = SiteRange(site_id, 0, self._sites[site_id].out_features)

    def build(self) -> SiteTable:
        """The finished table."""
        return SiteTable(tuple(self._sites), self._modules)
