"""The inputs of a step as arrays on the host, made in one pass over the plan's rows.

All code that iterates over the plan's rows before the step is launched is here, so that a batch of
256 rows is iterated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from loraplex.api.pooling import Pooling
from loraplex_services.worker.layers.ropes import Ropes
from loraplex_services.worker.ops.lora.runs import RowRun, row_runs
from loraplex_services.worker.types.request import Request
from loraplex_services.worker.types.step_plan import StepPlan

Int64s: TypeAlias = NDArray[np.int64]
Slots: TypeAlias = Sequence[tuple[int, float]]
"""(slot, coefficient) pairs."""
NO_SLOTS: Slots = ()
Segment: TypeAlias = tuple[int, Slots]
"""A number of token rows, and the slots that all of them use."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step on the host; n planned rows with T token rows."""

    plan: StepPlan
    runs: tuple[RowRun, ...]
    """The adapters of the token rows."""
    token_ids: Int64s
    """`[T]`; 0 for a token that only the device knows."""
    starts: Int64s
    """`[n]`: the first position of each planned row."""
    num_tokens: Int64s
    """`[n]`: the token rows of each planned row."""
    rope_rows: Int64s | None
    """`[n]`: see `Ropes.row`; None if every row uses the base's row for short sequences."""
    follows: Int64s
    """`[2, f]`: token rows whose token is an output of the step before, and which output it is."""
    read_rows: Int64s | None = None
    """int64, ascending: the only token rows whose hidden states are read. None = others may be
    read, too, or these are all rows."""

    @property
    def num_rows(self) -> int:
        """Number of planned rows."""
        return len(self.starts)

    @property
    def num_token_rows(self) -> int:
        """Number of token rows of all planned rows."""
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether each planned row is the one next position of a request that decodes."""
        return self.plan.num_contexts == 0

    def per_token(self, values: Int64s) -> Int64s:
        """`[T]`: the value of each token row's planned row, given `[n]`."""
        if len(values) == self.num_token_rows:
            return values
        return np.repeat(values, self.num_tokens)

    def positions(self) -> Int64s:
        """`[T]`: the position of each token row."""
        if self.num_rows == self.num_token_rows:
            return self.starts
        begins = np.cumsum(self.num_tokens) - self.num_tokens
        positions: Int64s = np.repeat(self.starts - begins, self.num_tokens)
        positions += np.arange(self.num_token_rows)
        return positions


def _reads_prompt(request: Request) -> bool:
    """Whether more is read of its prompt than the last hidden state."""
    return request.sampling.prompt_logprobs is not None or request.pooling is Pooling.MEAN


def _read_rows(plan: StepPlan, counts: Sequence[int]) -> Int64s | None:
    """See `StepInputs.read_rows`: the last of each planned row, and those that drafts are compared
    with."""
    contexts = plan.contexts
    if not contexts or plan.notes_experts or any(_reads_prompt(row.request) for row in contexts):
        return None
    ends = np.cumsum(counts, dtype=np.int64)
    found = ends - 1
    if any(row.drafts for row in contexts):
        spans = [
            np.arange(end - 1 - len(row.drafts), end)
            for end, row in zip(ends.tolist(), plan.rows, strict=True)
        ]
        found = np.concatenate(spans)
    return found if len(found) < ends[-1] else None


def read_plan(plan: StepPlan, ropes: Ropes) -> StepInputs:
    """Walk the rows of a plan once."""
    token_ids: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    followers: list[int] = []
    sources: list[int] = []
    rope_rows = np.zeros(len(plan.rows), dtype=np.int64)
    segments: list[Segment] = []
    num_alike, last_slots = 0, NO_SLOTS
    has_ropes = ropes.has_own
    for request, start, count, _, slots, follows, drafts, _ in plan.rows:
        if follows is not None:
            followers.append(len(token_ids))
            sources.append(follows)
            token_ids.append(0)
        else:
            token_ids += request.tokens(start, start + count - len(drafts))
            token_ids += drafts
        starts.append(start)
        counts.append(count)
        if has_ropes or request.is_long:
            rope_rows[len(starts) - 1] = ropes.row(slots, request.is_long)
        if slots != last_slots:
            segments.append((num_alike, last_slots))
            num_alike, last_slots = 0, slots
        if request.adapters_from > start:  # its adapters do not act on these tokens yet
            num_plain = min(request.adapters_from - start, count)
            segments += [(num_alike, slots), (num_plain, NO_SLOTS)]
            num_alike, count = 0, count - num_plain
        num_alike += count
    segments.append((num_alike, last_slots))
    return StepInputs(
        plan,
        row_runs(segments),
        np.array(token_ids, dtype=np.int64),
        np.array(starts, dtype=np.int64),
        np.array(counts, dtype=np.int64),
        rope_rows if rope_rows.any() else None,
        np.array((followers, sources), dtype=np.int64),
        _read_rows(plan, counts),
    )
