"""Running means over the engine's steps, and its current load."""

from __future__ import annotations

from loraplex.api.residency import WorkerLoad
from loraplex_services.worker.cache.arena import Arena
from loraplex_services.worker.cache.reclaimer import Reclaimer
from loraplex_services.worker.scheduling.scheduler import Scheduler
from loraplex_services.worker.types.step_plan import StepPlan

_NEW_SHARE = 0.1
"""Weight of the newest step in running means."""


class EngineStats:
    """Measurements of the engine's own steps."""

    def __init__(self, max_running: int) -> None:
        """`max_running`: most requests in the batch."""
        self._max_running = max_running
        self._steps = 0
        self.step_s = 0.0
        """Mean seconds of a step; 0 = not known yet."""
        self._prefill_tokens_per_s = 0.0
        self._max_distinct_adapters = 0

    def measure(self, plan: StepPlan, elapsed_s: float) -> None:
        """Note one step that computed something."""
        self._steps += 1
        self.step_s = _mean(self.step_s, elapsed_s)
        self._max_distinct_adapters = max(self._max_distinct_adapters, plan.num_distinct_adapters)
        if elapsed_s > 0 and (num_prompt_tokens := plan.num_prompt_tokens):
            rate = num_prompt_tokens / elapsed_s
            self._prefill_tokens_per_s = _mean(self._prefill_tokens_per_s, rate)

    @property
    def prefill_token_s(self) -> float:
        """Mean seconds to compute a prompt token; 0 = not known yet."""
        return 1.0 / self._prefill_tokens_per_s if self._prefill_tokens_per_s else 0.0

    def load(self, scheduler: Scheduler, reclaimer: Reclaimer, arena: Arena) -> WorkerLoad:
        """The current load."""
        idle_blocks = reclaimer.idle_blocks()
        return WorkerLoad(
            running_requests=scheduler.num_running,
            max_running_requests=self._max_running,
            is_full=scheduler.is_full,
            waiting_requests=scheduler.num_waiting,
            queued_tokens=scheduler.queued_tokens,
            free_blocks=arena.num_free + arena.num_retiring + idle_blocks,
            idle_blocks=idle_blocks,
            total_blocks=arena.num_blocks,
            step_s=self.step_s,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            max_distinct_adapters=self._max_distinct_adapters,
            steps=self._steps,
        )


def _mean(old: float, new: float) -> float:
    return new if old == 0.0 else (1.0 - _NEW_SHARE) * old + _NEW_SHARE * new
