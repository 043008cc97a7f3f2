"""The adapters of each row of a batch, and where kernels find them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from loraplex_services.worker.ops.lora.cpu_records import Records, pack_runs
from loraplex_services.worker.ops.lora.device_tables import DeviceTables
from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.tables import DeltaTable

if TYPE_CHECKING:  # Triton may not be installed
    from loraplex_services.worker.ops.lora.long_runs import LongWork
    from loraplex_services.worker.ops.lora.step_work import StepWork


class PendingCopy(Protocol):
    """An adapter that is being copied; see `adapters.device.copy_events`."""

    def wait(self, site_id: int) -> None:
        """Let the current stream wait for its bytes at a site."""
        ...

    def wait_all(self) -> None:
        """Let the current stream wait for all its bytes."""
        ...


@dataclass(frozen=True)
class LoraBatch:
    """The adapters of one step."""

    runs: tuple[RowRun, ...]
    table: DeltaTable
    records: Records | None = None
    """The table as C++ reads it; None if torch computes."""
    tables: DeviceTables | None = None
    """The table as Triton reads it; None elsewhere."""
    work: StepWork | None = None
    """The short runs on the device, with their groups listed; None = there are none, or it is to be
    made where it is needed."""
    long: LongWork | None = None
    """The long runs on the device; None = there are none."""
    sites: Set[int] | None = None
    """Sites where kernels have anything to add; None = it is seen at the site."""
    pending_copies: tuple[PendingCopy, ...] = ()
    """Adapters whose bytes are not all on the device yet."""
    runs_at: Tensor | None = None
    """Where C++ is to read the runs; None = in `packed_runs` of their own."""

    def await_site(self, site_id: int) -> None:
        """Let what is launched next read the adapters at a site."""
        for pending_copy in self.pending_copies:
            pending_copy.wait(site_id)

    @property
    def has_work(self) -> bool:
        """Whether the runs are on the device."""
        return self.work is not None or self.long is not None

    @property
    def may_act(self) -> bool:
        """Whether some row may have an adapter: captured steps have their runs on the device
        only."""
        return self.has_work or bool(self.runs)

    @cached_property
    def packed_runs(self) -> Tensor:
        """The runs as C++ reads them."""
        if self.runs_at is not None:
            return self.runs_at
        assert self.records is not None, "C++ kernels need records"
        address = self.records.address
        return pack_runs([(address(r.slot), r.begin, r.end, r.coef) for r in self.runs])

    @cached_property
    def trains_norms(self) -> bool:
        """Whether some adapter replaces a norm's weight."""
        if self.tables is not None:
            return any(self.tables.entered(run.slot).trains_norms for run in self.runs)
        return self.records is not None and any(
            self.records.trains_norms(run.slot) for run in self.runs
        )

    @property
    def adds_only(self) -> bool:
        """Whether no adapter replaces any weight of the base."""
        return not (self.trains_norms or self._may_replace_rows)

    @cached_property
    def _may_replace_rows(self) -> bool:
        """Whether some adapter replaces rows of a weight; usually none does."""
        if self.tables is not None:
            return any(self.tables.entered(run.slot).in_torch for run in self.runs)
        if self.records is not None:
            return any(self.records.replaces_rows(run.slot) for run in self.runs)
        return True

    def replaces_rows(self, site_id: int) -> bool:
        """Whether some adapter replaces rows of the site's weight."""
        if not self._may_replace_rows:
            return False
        deltas = (self.table.get((run.slot, site_id)) for run in self.runs)
        return any(delta is not None and delta.replaces_rows for delta in deltas)

    def resized(self, site_id: int) -> list[tuple[int, int, int]]:
        """Token rows [begin, end) whose adapter has an embedding and head of another length than
        the base's, and that length."""
        if not self._may_replace_rows:
            return []
        found = ((run, self.table.get((run.slot, site_id))) for run in self.runs)
        return [
            (run.begin, run.end, delta.num_rows)
            for run, delta in found
            if delta is not None and delta.num_rows
        ]

    def select(self, token_rows: Sequence[int]) -> LoraBatch:
        """A batch of some token rows, ascending, renumbered from 0."""
        runs = []
        for run in self.runs:
            begin, end = bisect_left(token_rows, run.begin), bisect_left(token_rows, run.end)
            if begin < end:
                runs.append(RowRun(run.slot, run.coef, begin, end))
        return LoraBatch(
            tuple(runs), self.table, self.records, self.tables, pending_copies=self.pending_copies
        )
