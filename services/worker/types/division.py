"""Whether ranks divide one matrix of an adapter's pairs at a site, or both. No tensors.

It is decided for each site when a worker starts, from settings and shapes alone, so that images of
adapters do not depend on the load. Decision 13 explains the arithmetic and the constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex_services.worker.types.sharding import Cut

INTERMEDIATE_BYTES = 4
"""Bytes of a number of A x, which is sent in float32."""
WIDENING_BYTES = 8
"""Bytes that torch moves in addition for each number in less than float32: it writes it as float32
and reads it again."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """The costs of moving bytes for one rank."""

    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Sent to the other ranks of the machine."""
    collective_s: float
    """Time of a small collective."""
    update_s: float
    """Time that each adapter of a step adds where both matrices are divided: torch then computes
    the updates one after another."""


COSTS = {
    "cuda": MoveCosts(3.35e12, 450e9, 10e-6, 20e-6),
    "cpu": MoveCosts(20e9, 2e9, 150e-6, 20e-6),
}
"""By type of device. For `cuda`, the data sheet of an H100 with NVLink and usual times of a small
NCCL collective and of four launches, which were not measured; for `cpu`, gloo and torch on a
machine of two cores."""


@dataclass(frozen=True, slots=True)
class Division:
    """How a worker's ranks divide adapters."""

    num_ranks: int = 1
    is_full: bool = False
    """Whether both matrices are divided at every linear, whatever it costs."""
    costs: MoveCosts | None = None
    """None = one matrix is divided everywhere, unless `is_full`."""
    item_bytes: int = 4
    """Bytes of a number of A and B."""
    max_rank: int = 0
    """Largest rank of an adapter."""
    max_num_rows: int = 0
    """Most rows of a decode step."""
    max_num_adapters: int = 0
    """Most adapters of a step."""

    def divides_both(self, num_inputs: int, outputs: Sequence[int], cut: Cut) -> bool:
        """Whether both are divided at a linear of stacked modules with that many outputs each.

        They are if that is cheaper in a step of one row, and in the largest step of rows with
        adapters of the largest rank.
        """
        if self.num_ranks == 1 or not (cut.outputs or cut.inputs):
            return False
        if self.is_full or self.costs is None:
            return self.is_full
        steps = (1, 1), (self.max_num_rows, min(self.max_num_rows, self.max_num_adapters))
        return all(
            self.both_s(self.costs, num_inputs, outputs, cut, *step)
            < self.one_s(self.costs, num_inputs, outputs, cut, step[1])
            for step in steps
        )

    def one_s(
        self,
        costs: MoveCosts,
        num_inputs: int,
        outputs: Sequence[int],
        cut: Cut,
        num_adapters: int,
    ) -> float:
        """Seconds in which a rank reads that many adapters where one matrix is divided."""
        num_a = self.max_rank * len(outputs) * num_inputs
        num_b = self.max_rank * sum(outputs)
        complete, divided = (num_a, num_b) if cut.outputs else (num_b, num_a)
        num_items = num_adapters * (complete + divided / self.num_ranks)
        return num_items * self.item_bytes / costs.memory_bytes_per_s

    def both_s(
        self,
        costs: MoveCosts,
        num_inputs: int,
        outputs: Sequence[int],
        cut: Cut,
        num_rows: int,
        num_adapters: int,
    ) -> float:
        """The same where both are divided, with what a rank sends for `num_rows`: a gather of A x
        where outputs are divided, a sum where inputs are."""
        num_items = num_adapters * self.max_rank * (num_inputs * len(outputs) + sum(outputs))
        item_bytes = self.item_bytes + WIDENING_BYTES * (self.item_bytes < INTERMEDIATE_BYTES)
        read_s = num_items / self.num_ranks * item_bytes / costs.memory_bytes_per_s
        num_sent = num_rows * self.max_rank * len(outputs) * (1 if cut.outputs else 2)
        sent_bytes = num_sent * INTERMEDIATE_BYTES * (self.num_ranks - 1) / self.num_ranks
        send_s = sent_bytes / costs.link_bytes_per_s + costs.collective_s
        return read_s + send_s + num_adapters * costs.update_s


ONE_MATRIX = Division()
"""The division of a base that has one rank."""
