"""Runs steps in launch order, on a separate thread or stream if they overlap.

On a GPU, the stream determines the order, and a launch only enqueues work. On a CPU, one thread
runs the steps; torch and the kernels release the GIL while they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from loraplex_services.worker.runner.step_results import StepResults
from loraplex_services.worker.types.step_plan import SampledRow

T = TypeVar("T")


@dataclass(slots=True)
class PendingStep:
    """Implements `runner_protocol.LaunchedStep`."""

    results: Future[StepResults] | None
    """None while its sampling has not begun."""
    sampling: Callable[[], Future[StepResults]] | None = None
    """Begins the sampling."""

    def choose_tokens(self) -> None:
        """Begin the sampling."""
        assert self.results is None and self.sampling is not None, "sampling has begun"
        self.results = self.sampling()

    def result(self) -> list[SampledRow]:
        """Wait for the step."""
        assert self.results is not None, "sampling has not begun"
        return self.results.result().read()


class InlineExecutor(Executor):
    """Runs each task while it is submitted: steps that do not overlap, and, in tools and tests, the
    copies of adapters."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]  # as inherited
        """A future that is done."""
        future: Future[object] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class StepOrder:
    """Runs steps and changes between them in the order of the calls."""

    def __init__(self, device_type: str, overlap: str) -> None:
        """`overlap`: `auto` (where it is known to pay: on GPUs), `on` or `off`."""
        has_stream = device_type == "cuda"
        self.overlaps = overlap == "on" or (overlap == "auto" and has_stream)
        has_thread = self.overlaps and not has_stream
        self._executor: Executor = ThreadPoolExecutor(1, "step") if has_thread else InlineExecutor()

    def launch(
        self, forward: Callable[[], T], choose: Callable[[T], StepResults], at_once: bool
    ) -> PendingStep:
        """Begin a step: its forward pass and, where that is to be `at_once`, its sampling."""
        if at_once:
            return PendingStep(self._executor.submit(lambda: choose(forward())))
        passed = self._executor.submit(forward)
        return PendingStep(None, lambda: self._executor.submit(lambda: choose(passed.result())))

    def between(self, change: Callable[[], T]) -> T:
        """Run a function after all launched steps and before any later step. Waits for it."""
        return self._executor.submit(change).result()
