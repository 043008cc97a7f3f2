"""Steps in the order in which they were launched, beside their caller where they overlap.

On a GPU the stream is the order, and what launches only enqueues. On a CPU it is one thread: torch
and the kernels let go of the GIL while they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from services.worker.adapters.loader import AtOnce
from services.worker.request import SampledRow
from services.worker.step_results import StepResults

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """Implements `runner_protocol.LaunchedStep`."""

    results: Future[StepResults]

    def result(self) -> list[SampledRow]:
        """Wait for the step."""
        return self.results.result().read()


class StepOrder:
    """Runs one thing after the other."""

    def __init__(self, device_type: str, overlap: str) -> None:
        """`overlap`: `auto` (where it is known to pay: on GPUs), `on` or `off`."""
        has_stream = device_type == "cuda"
        self.overlaps = overlap == "on" or (overlap == "auto" and has_stream)
        has_thread = self.overlaps and not has_stream
        self._executor: Executor = ThreadPoolExecutor(1, "step") if has_thread else AtOnce()

    def launch(self, compute: Callable[[], StepResults]) -> StepUnderWay:
        """Begin a step."""
        return StepUnderWay(self._executor.submit(compute))

    def between(self, change: Callable[[], T]) -> T:
        """Do something after all steps launched and before any that comes. Waits for it."""
        return self._executor.submit(change).result()
