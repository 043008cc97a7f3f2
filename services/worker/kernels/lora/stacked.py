"""The low-rank update in plain torch for steps of many short runs: stacked adapters and a mask.

A call of torch costs tens of microseconds, however small its product is, so one product for each
run of a decode step is mostly calls. Here the adapters of a site lie stacked: one product of all
rows with all their A, a mask that leaves each row its own adapters' ranks, one product with all B.
The stacks are copies, kept while the adapters that steps ask for stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.kernels.lora import torch as portable
from services.worker.kernels.lora.runs import RowRun
from services.worker.kernels.lora.tables import SiteDelta, Tile
from services.worker.kernels.lora.worklist import LoraBatch

MAX_STACKED_BYTES = 1 << 30
"""More than this is never kept, whatever the arena."""
ARENA_SHARE = 3
"""Stacks take one part in so many of the memory that is given to the arena."""
WORTH_OF_A_RUN = 10_000_000
"""Multiply-adds that take as long as the calls for one run."""
NOBODY = -1
RANK_MULTIPLE = 32
"""Stacked ranks of a group are padded to whole tiles of the processor, if it has any: oneDNN reads
whole ones, and the columns behind must not be another group's, which may be NaN."""
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}

Use = tuple[RowRun, SiteDelta]
Span = tuple[int, int]
"""[begin, end)."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Stacked rank rows [begin, end) and the outputs they reach."""

    begin: int
    end: int
    out_begin: int
    out_end: int
    b: Tensor
    """`[end - begin, out_end - out_begin]`."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Some adapters at one site."""

    members: dict[int, SiteDelta]
    """By slot."""
    a: Tensor
    """`[R, in]`."""
    outputs: tuple[Outputs, ...]
    owners: tuple[tuple[int, int], ...]
    """Whose the stacked rank rows are: (slot or NOBODY, how many of them), in order."""
    scales: Tensor
    """float32 `[R]`."""
    rank: int
    """Of all members."""

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return self.a.nbytes + sum(part.b.nbytes for part in self.outputs)

    def holds(self, uses: Sequence[Use], rank: int) -> bool:
        """Whether all of them are here, and not too many others for their total `rank`."""
        if any(self.members.get(run.slot) is not delta for run, delta in uses):
            return False
        return self.rank <= 2 * rank


@dataclass(frozen=True, slots=True)
class Mask:
    """What a batch's rows use of a stack's rank rows."""

    bits: Tensor
    """Integers as wide as the activations, `[T, R]`: all bits of a used place, else none."""
    weights: Tensor
    """float32 `[T, R]`: scale times coefficient."""


def stacked_share(arena_bytes: int) -> int:
    """What stacks may take of the memory for KV cache and adapters."""
    return min(MAX_STACKED_BYTES, arena_bytes // ARENA_SHARE)


class StackedLora:
    """`add_lora` for all sites of a model; stacks are made when a step first needs them."""

    def __init__(self, max_bytes: int = MAX_STACKED_BYTES) -> None:
        """`max_bytes`: of all sites together; beyond them runs are computed one by one."""
        self._max_bytes = max_bytes
        self._stacks: dict[int, Stack] = {}
        self._num_bytes = 0
        self._batch: LoraBatch | None = None
        self._masks: dict[tuple[tuple[int, int], ...], tuple[Tensor, Mask]] = {}

    def add_lora(self, y: Tensor, x: Tensor, site_id: int, lora: LoraBatch) -> None:
        """As `torch.add_lora`, to the rounding of y's dtype: in bfloat16 the rank-sized
        intermediate is rounded, too, as torch's products round what they return."""
        found = ((run, lora.table.get((run.slot, site_id))) for run in lora.runs)
        uses = [(run, delta) for run, delta in found if delta is not None]
        if not uses:
            return
        stack = self._stack(site_id, uses, y, x)
        if stack is None:
            portable.add_lora(y, x, site_id, lora)
            return
        mask = self._mask(stack, lora, y)
        shrunk = F.linear(x.contiguous(), stack.a)
        # By bits: 0 times what another tenant's adapter makes of this row could be NaN.
        shrunk.view(mask.bits.dtype).bitwise_and_(mask.bits)
        shrunk = (shrunk * mask.weights).to(y.dtype)
        for part in stack.outputs:
            columns = y[:, part.out_begin : part.out_end]
            columns.add_(shrunk[:, part.begin : part.end] @ part.b)
        for run, delta in uses:
            portable.apply_vectors(y[run.begin : run.end], delta, run.coef)

    def _stack(self, site_id: int, uses: Sequence[Use], y: Tensor, x: Tensor) -> Stack | None:
        """Of the site, for these runs; None where one by one is better, or the only way."""
        members = {run.slot: delta for run, delta in uses}
        rank = sum(len(delta.scales) for delta in members.values())
        work = len(x) * rank * (x.shape[1] + y.shape[1])
        if len(members) < 2 or work > len(uses) * WORTH_OF_A_RUN:
            return None
        stack = self._stacks.get(site_id)
        if stack is not None and stack.holds(uses, rank):
            return stack
        if y.dtype not in _BITS or not all(_is_plain(d, y.dtype) for d in members.values()):
            return None
        if stack is not None:
            self._num_bytes -= self._stacks.pop(site_id).num_bytes
        groups = {(p.out_begin, p.out_len) for d in members.values() for p in d.slices}
        padded = rank + len(groups) * (RANK_MULTIPLE - 1)
        if self._num_bytes + padded * (x.shape[1] + y.shape[1]) * y.itemsize > self._max_bytes:
            return None
        stack = self._stacks[site_id] = make_stack(members, x.shape[1], y.dtype)
        self._num_bytes += stack.num_bytes
        return stack

    def _mask(self, stack: Stack, lora: LoraBatch, y: Tensor) -> Mask:
        """The same for all sites of a batch whose stacks are alike."""
        if self._batch is not lora:
            self._batch = lora
            self._masks.clear()
        known = self._masks.get(stack.owners)
        if known is not None and known[0].equal(stack.scales):
            return known[1]
        mask = make_mask(stack, lora.runs, len(y), y.dtype)
        self._masks[stack.owners] = stack.scales, mask
        return mask


def make_stack(members: dict[int, SiteDelta], num_inputs: int, dtype: torch.dtype) -> Stack:
    """Copy adapters side by side, in groups that reach the same outputs."""
    groups: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for slot, delta in members.items():
        for part in delta.slices:
            span = part.out_begin, part.out_begin + part.out_len
            groups.setdefault(span, []).append((slot, part.rank_begin, part.rank_len))
    padded = {
        span: -(-sum(num for _, _, num in parts) // RANK_MULTIPLE) * RANK_MULTIPLE
        for span, parts in groups.items()
    }
    total = sum(padded.values())
    a = torch.zeros(total, num_inputs, dtype=dtype)
    scales = torch.zeros(total)
    outputs: list[Outputs] = []
    owners: list[tuple[int, int]] = []
    row = 0
    for (out_begin, out_end), parts in sorted(groups.items()):
        begin, end = row, row + padded[out_begin, out_end]
        b = torch.zeros(end - begin, out_end - out_begin, dtype=dtype)
        for slot, rank_begin, num in parts:
            delta = members[slot]
            ranks = rank_begin, rank_begin + num
            for tile in delta.a:
                _copy(a[row : row + num], tile, ranks, (0, num_inputs))
            for tile in delta.b:
                target = b[row - begin : row - begin + num]
                _copy(target, tile, ranks, (out_begin, out_end))
            scales[row : row + num] = delta.scales[rank_begin : rank_begin + num]
            owners.append((slot, num))
            row += num
        owners.append((NOBODY, end - row))
        outputs.append(Outputs(begin, end, out_begin, out_end, b))
        row = end
    rank = sum(len(delta.scales) for delta in members.values())
    return Stack(dict(members), a, tuple(outputs), tuple(owners), scales, rank)


def make_mask(stack: Stack, runs: Sequence[RowRun], num_rows: int, dtype: torch.dtype) -> Mask:
    """See Mask; an adapter that a row uses twice counts with the sum of its coefficients."""
    slots = sorted({slot for slot, _ in stack.owners})
    place = {slot: i for i, slot in enumerate(slots)}
    coefs = torch.zeros(num_rows, len(slots))
    is_used = torch.zeros(num_rows, len(slots), dtype=_BITS[dtype])
    for run in runs:
        if run.slot in place:
            coefs[run.begin : run.end, place[run.slot]] += run.coef
            is_used[run.begin : run.end, place[run.slot]] = -1
    counts = torch.tensor([num for _, num in stack.owners], dtype=torch.int64)
    places = torch.tensor([place[slot] for slot, _ in stack.owners], dtype=torch.int64)
    owners = places.repeat_interleave(counts)  # none where no adapter of the step has rank rows
    return Mask(is_used[:, owners], coefs[:, owners] * stack.scales)


def _is_plain(delta: SiteDelta, dtype: torch.dtype) -> bool:
    tiles = (*delta.a, *delta.b)
    return not delta.replaces_rows and all(tile.data.dtype is dtype for tile in tiles)


def _copy(target: Tensor, tile: Tile, ranks: Span, columns: Span) -> None:
    """What the tile holds of rank rows and columns [begin, end), to its place in `target`."""
    to_rows, from_rows = _overlap((tile.row_begin, tile.row_end), ranks)
    to_columns, from_columns = _overlap((tile.col_begin, tile.col_end), columns)
    target[to_rows, to_columns] = tile.data[from_rows, from_columns]


def _overlap(tile: Span, wanted: Span) -> tuple[slice, slice]:
    """What both have, counted from the wanted begin and from the tile's."""
    begin = max(tile[0], wanted[0])
    end = max(begin, min(tile[1], wanted[1]))
    return slice(begin - wanted[0], end - wanted[0]), slice(begin - tile[0], end - tile[0])
