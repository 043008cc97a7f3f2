"""Low-rank updates with both matrices divided among the ranks (see `types.division`).

Source: Sheng et al. 2023, "S-LoRA", section 6. At a site that is cut by outputs, ranks divide the
rank rows of A, gather the rank-sized intermediates and multiply them with their own outputs of B.
At a site that is cut by inputs, they divide A's inputs, sum the intermediates and multiply them
with their own share of B's outputs; the base's sum over the ranks brings those together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from loraplex_services.worker.layers.ranks import Ranks
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.tables import SiteDelta
from loraplex_services.worker.ops.lora.torch import (
    apply_vectors,
    expand,
    replace_outputs,
    shrink,
)
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.transfers import to_device
from loraplex_services.worker.types.sharding import padded_share, share_of

MAX_ORDERS = 1024
"""Orders of rank rows that are kept on the device, one for each combination of the ranks of a
site's slices."""
Found = Sequence[tuple[RowRun, SiteDelta]]
"""Row runs with a low-rank update at the site; the same on every rank."""


class ShardedLora:
    """`add_lora` of a site that is cut by outputs or by inputs."""

    def __init__(self, ranks: Ranks, *, is_cut_by_outputs: bool) -> None:
        self._ranks = ranks
        self._complete: Callable[[list[Tensor], Found], list[Tensor]]
        self._complete = self._gathered if is_cut_by_outputs else self._summed
        self._is_cut_by_outputs = is_cut_by_outputs

    def __call__(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """See `ops.lora.torch.add_lora`; computes this rank's part."""
        lora.await_site(site_id)
        pairs = [(run, lora.table.get((run.slot, site_id))) for run in lora.runs]
        deltas = [(run, delta) for run, delta in pairs if delta is not None]
        for run, delta in deltas:
            if delta.row_ids is not None:
                rows = slice(run.begin, run.end)
                replace_outputs(y[rows], x[rows], delta.rows, delta.row_ids)
        found = [(run, delta) for run, delta in deltas if delta.slices]
        if found:
            parts = [
                shrink(x[run.begin : run.end], delta.a, self._num_own(delta))
                for run, delta in found
            ]
            for (run, delta), shrunk in zip(found, self._complete(parts, found), strict=True):
                expand(y[run.begin : run.end], shrunk, delta, run.coef)
        for run, delta in deltas:
            apply_vectors(y[run.begin : run.end], delta, run.coef)

    def _num_own(self, delta: SiteDelta) -> int:
        """Rows of A on this rank, including its padding."""
        if not self._is_cut_by_outputs:
            return delta.rank
        return sum(padded_share(part.rank_len, self._ranks.shard.size) for part in delta.slices)

    def _gathered(self, parts: list[Tensor], found: Found) -> list[Tensor]:
        size = self._ranks.shard.size
        every = self._ranks.all_gather(torch.cat([part.flatten() for part in parts]))
        out = []
        by_part = every.split([part.numel() for part in parts], dim=1)
        for mine, part, (_, delta) in zip(by_part, parts, found, strict=True):
            stacked = mine.view(size, *part.shape).movedim(0, 1).flatten(1)
            rank_lens = tuple(part.rank_len for part in delta.slices)
            out.append(stacked.index_select(1, _order(rank_lens, size, stacked.device)))
        return out

    def _summed(self, parts: list[Tensor], found: Found) -> list[Tensor]:
        summed = self._ranks.all_reduce(torch.cat([part.flatten() for part in parts]))
        lengths = [part.numel() for part in parts]
        pairs = zip(summed.split(lengths), parts, strict=True)
        return [summed.view(part.shape) for summed, part in pairs]


@lru_cache(MAX_ORDERS)
def _order(rank_lens: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Where each rank row of an adapter is among those of all `size` ranks, side by side.

    Args:
        rank_lens: rank rows of each of its slices.

    Returns: int64 `[sum of rank_lens]`.
    """
    num_own = sum(padded_share(rank_len, size) for rank_len in rank_lens)
    order: list[int] = []
    begin = 0
    for rank_len in rank_lens:
        for rank in range(size):
            first, last = share_of(rank_len, rank, size)
            order += range(rank * num_own + begin, rank * num_own + begin + last - first)
        begin += padded_share(rank_len, size)
    return to_device(torch.tensor(order), device)
