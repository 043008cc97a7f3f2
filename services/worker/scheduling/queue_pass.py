"""The results so far of one walk over the waiting queue."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex_services.worker.scheduling.queue import Walk
from loraplex_services.worker.scheduling.uncached import num_cached_tokens
from loraplex_services.worker.types.step_plan import PlannedRow

MAX_LOADS_PER_STEP = 16
"""Largest number of adapter copies to the device that one step begins."""
MAX_PASSED_OVER = 16
"""Number of long prompts that may wait for another one; the queue behind them is not searched."""


@dataclass(slots=True)
class QueuePass:
    """One walk of the scheduler, which starts requests and the loads of others."""

    walk: Walk
    budget: int
    """Tokens that the step has left."""
    most: int
    """Most tokens of the requests that start, unless it is only one."""
    rows: list[PlannedRow] = field(default_factory=list)
    """Rows of the requests that start."""
    ahead: dict[str, None] = field(default_factory=dict)
    """Adapters of the requests that were visited, in order."""
    loads_left: int = MAX_LOADS_PER_STEP
    may_repeat: bool = field(init=False)
    """Whether the next walk may start more even if nothing changes in between."""
    _num_passed_over: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.may_repeat = self.budget <= 0

    def started(self, row: PlannedRow) -> None:
        """Note that a request starts."""
        self.rows.append(row)
        self.budget = max(0, min(self.budget, self.most) - num_cached_tokens([row]))

    def loads_began(self, fits: bool) -> None:
        """Note that a request's loads began; no other's may follow unless they all fit."""
        self.loads_left = self.loads_left - 1 if fits else 0
        self.walk.takes_absent = self.loads_left > 0
        self.may_repeat = self.may_repeat or not self.loads_left

    def pass_over(self) -> None:
        """Leave a long prompt waiting for another one."""
        self.may_repeat = True
        self._num_passed_over += 1
        if self._num_passed_over >= MAX_PASSED_OVER:
            self.walk.skip_flow()
