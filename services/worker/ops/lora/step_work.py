"""A step's row runs on the device, at fixed addresses, and the groups listed for every part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_services.worker.ops.launch import power_of_two
from loraplex_services.worker.ops.lora import triton_lists as kernels
from loraplex_services.worker.ops.lora.device_records import GROUP_ROWS, RECORD_WORDS, float_bits
from loraplex_services.worker.ops.lora.device_tables import DeviceTables
from loraplex_services.worker.ops.lora.launch_plan import GRAPH_GROUPS, TILE_ROWS, num_splits
from loraplex_services.worker.ops.lora.runs import RowRun, cut_at_tiles
from loraplex_services.worker.transfers import copy_into

MIN_RUNS = 256
"""Steps with fewer runs share compiled kernels: none is compiled while requests wait."""
MAX_RUN_VECTORS = 2
"""Vector records of a part that a run may have in a captured step: one, or two where it is cut."""


@dataclass(frozen=True, slots=True)
class WorkSize:
    """The most that the adapters of a step may need."""

    num_rows: int
    num_runs: int
    num_groups: int
    """Groups of the part that has most."""
    num_vectors: int = 1

    @property
    def num_tiles(self) -> int:
        """Tiles of rows."""
        return -(-self.num_rows // TILE_ROWS)


class StepWork:
    """The lists of one step, and the workspace of its updates."""

    def __init__(self, tables: DeviceTables, size: WorkSize, runs: Tensor | None = None) -> None:
        """`runs`: int32 `[max_runs, 4]` on the device that the caller fills, instead of `fill`."""
        device, num_parts = tables.arena.device, len(tables.parts)
        self.tables = tables
        self.max_runs = max(MIN_RUNS, power_of_two(size.num_runs))
        self.max_groups = max(1, size.num_groups)
        self.max_tiles = max(1, size.num_tiles)
        self.max_vectors = max(1, size.num_vectors)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        words = RECORD_WORDS
        self.runs = integers(self.max_runs, 4) if runs is None else runs
        assert self.runs.shape == (self.max_runs, 4), self.runs.shape
        self.entries = integers(num_parts, self.max_groups, words, dtype=torch.int64)
        self.lanes = integers(num_parts, self.max_groups, GROUP_ROWS, dtype=torch.int64)
        self.counts = integers(num_parts, 2)
        self.tile_ends = integers(num_parts, self.max_tiles)
        self.vectors = integers(num_parts, self.max_vectors, words, dtype=torch.int64)
        self.tickets = integers(num_parts, self.max_groups)
        self.done = integers(num_parts)
        group_numbers = GROUP_ROWS * TILE_ROWS
        self.partial = torch.empty(
            max(_num_partial_sums(tables)) * self.max_groups * group_numbers,
            dtype=torch.float32,
            device=device,
        )
        self.intermediates: dict[torch.dtype, Tensor] = {}
        self._num_intermediate = tables.max_parts * self.max_groups * 2 * group_numbers

    def intermediate(self, dtype: torch.dtype) -> Tensor:
        """The product of A and the rows, for a B of `dtype`. Allocated at its first use, on the
        stream that is current then, which may be the side stream (see `side_stream.py`)."""
        if dtype not in self.intermediates:
            self.intermediates[dtype] = torch.empty(
                self._num_intermediate, dtype=dtype, device=self.tables.arena.device
            )
        return self.intermediates[dtype]

    def arrays(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The arguments of `update_site`, in its order; `dtype` is that of x and y."""
        lists = self.entries, self.lanes, self.counts, self.tile_ends, self.vectors
        return self.partial, self.intermediate(dtype), *lists, self.tickets, self.done

    def fill(self, runs: Sequence[RowRun]) -> None:
        """Copy a step's runs to the device; `list_groups` must follow."""
        cut = cut_at_tiles(runs)
        assert len(cut) <= self.max_runs, (len(cut), self.max_runs)
        words = [(run.slot, run.begin, run.end, float_bits(run.coef)) for run in cut]
        words += [(0, 0, 0, 0)] * (self.max_runs - len(words))
        copy_into(self.runs, torch.tensor(words, dtype=torch.int32))

    def list_groups(self, num_rows: int) -> None:
        """List the groups of all parts in one launch, for a step of `num_rows` token rows."""
        tables, num_tiles = self.tables, -(-num_rows // TILE_ROWS)
        assert num_tiles <= self.max_tiles, (num_rows, self.max_tiles)
        kernels.list_groups[(len(tables.parts),)](
            self.runs,
            tables.index,
            tables.records,
            self.entries,
            self.lanes,
            self.counts,
            self.tile_ends,
            self.vectors,
            self.done,
            0,
            len(tables.parts),
            self.max_groups,
            self.max_tiles,
            num_tiles,
            self.max_vectors,
            MAX_RUNS=self.max_runs,
        )


def work_size(tables: DeviceTables, runs: Sequence[RowRun], num_rows: int) -> WorkSize:
    """The sizes that the runs of a step need."""
    cut = cut_at_tiles(runs)
    groups = sum(tables.entered(run.slot).max_groups for run in cut)
    vectors = sum(tables.entered(run.slot).max_vectors for run in cut)
    return WorkSize(num_rows, len(cut), groups, vectors)


def static_work(tables: DeviceTables, max_rows: int, runs: Tensor) -> StepWork:
    """The work of all captured steps of up to `max_rows` token rows, whose runs are in `runs`."""
    vectors = MAX_RUN_VECTORS * len(runs)
    return StepWork(tables, WorkSize(max_rows, len(runs), GRAPH_GROUPS, vectors), runs)


def fits_static_work(tables: DeviceTables, runs: Sequence[RowRun]) -> bool:
    """Whether these runs, split at tiles, fit the lists of captured steps."""
    entered = [tables.entered(run.slot) for run in runs]
    return (
        len(runs) <= MIN_RUNS
        and sum(adapter.max_groups for adapter in entered) <= GRAPH_GROUPS
        and all(adapter.max_vectors <= MAX_RUN_VECTORS for adapter in entered)
    )


def _num_partial_sums(tables: DeviceTables) -> list[int]:
    """The partial sums of a group in all parts of each site; none if there is one split."""
    sites = [(shape.num_inputs, len(shape.parts)) for shape in tables.shapes if shape.parts]
    counts = [(num_splits(*site), site[1]) for site in sites]
    return [splits * parts for splits, parts in counts if splits > 1] or [1]
