"""The row runs of a batch: which token rows use which adapter. Pure arithmetic.

Rows come in the fixed batch order (contexts, then generations; inside each by first slot, base rows
last), so an adapter has at most two runs unless requests combine several. Rows are never regrouped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loraplex_services.worker.ops.lora.launch_plan import TILE_ROWS

LONG_MIN_ROWS = 64
"""Rows of one adapter that are computed in tiles of their own."""


class RowRun(NamedTuple):
    """Token rows [begin, end) that use `slot` with one coefficient."""

    slot: int
    coef: float
    begin: int
    end: int


def row_runs(rows: Iterable[tuple[int, Sequence[tuple[int, float]]]]) -> tuple[RowRun, ...]:
    """Merge neighbours with the same adapters into runs, sorted by first row. Runs of the same rows
    are in the order in which requests list their adapters, so sums do not depend on other requests.

    Args:
        rows: in batch order, (number of token rows, [(slot, coefficient), ...]) of each request.
    """
    runs: list[RowRun] = []
    begin = end = 0
    last: Sequence[tuple[int, float]] = ()
    for num_tokens, adapters in rows:
        if num_tokens and adapters != last:
            runs += [RowRun(*key, begin, end) for key in last]
            last, begin = adapters, end
        end += num_tokens
    runs += [RowRun(*key, begin, end) for key in last]
    return tuple(runs)


def divided(runs: Sequence[RowRun]) -> tuple[tuple[RowRun, ...], tuple[RowRun, ...]]:
    """The short runs, and the long ones: those of many rows that use no other adapter as well."""
    if all(run.end - run.begin < LONG_MIN_ROWS for run in runs):
        return tuple(runs), ()
    short: list[RowRun] = []
    long: list[RowRun] = []
    end = 0
    for i, run in enumerate(runs):
        is_alone = end <= run.begin and all(run.end <= later.begin for later in runs[i + 1 : i + 2])
        is_long = is_alone and run.end - run.begin >= LONG_MIN_ROWS
        (long if is_long else short).append(run)
        end = max(end, run.end)
    return tuple(short), tuple(long)


def cut_at_tiles(runs: Sequence[RowRun]) -> list[RowRun]:
    """Split runs so that each is within one row tile, ordered by tile."""
    cut: list[RowRun] = []
    for run in runs:
        slot, coef, first, end = run
        begin = first - first % TILE_ROWS
        if end <= begin + TILE_ROWS:
            cut.append(run)
            continue
        for tile in range(begin, end, TILE_ROWS):
            cut.append(RowRun(slot, coef, max(first, tile), min(end, tile + TILE_ROWS)))
    if len(cut) > len(runs):  # else they are in order already
        cut.sort(key=lambda run: run.begin // TILE_ROWS)
    return cut
