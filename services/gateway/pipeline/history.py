"""The load of the last day at this gateway, in steps: for charts over a chosen range, and for a
summary of the last minute.

Each range has steps of its own, so that a chart has at most 144 points and nothing is merged when
it is drawn. All of them together take less than a megabyte, besides the names of the models of the
last minute. A restart begins with nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from loraplex.api.load import ModelLoad, RecentLoad
from loraplex_services.gateway.clock import now_s

OK, CANCELLED = "ok", "cancelled"
SAMPLE_S = 1.0
"""Seconds between two samples of the requests that run and wait."""
MAX_REASONS = 50
"""Most reasons of failures that are listed."""
MAX_MODELS = 100
"""Most models of the last minute that are listed."""
MAX_NAMES = 10_000
"""Models that are counted apart within a step; further ones are not listed."""
_BIN = math.log(1.1)
"""Times are counted in bins that are ten percent wide."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChartRange:
    """How far back a chart goes, and how long its steps are."""

    step_s: float
    num_steps: int


RANGES = {
    "5m": ChartRange(5.0, 60),
    "1h": ChartRange(30.0, 120),
    "6h": ChartRange(180.0, 120),
    "24h": ChartRange(600.0, 144),
}
_FINEST = "5m"
_RECENT_STEPS = 12
"""Finest steps within the last minute."""


@dataclass(slots=True)
class _Step:
    """The load within one step."""

    number: int
    """Number of the step, counted from the clock's zero."""
    requests: int = 0
    """Requests that ended, with those that were refused or given up."""
    served: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: Counter[int] = field(default_factory=Counter)
    """Number of first tokens by bin of their time."""
    running: int = 0
    """Most requests that ran at the same time."""
    waiting: int = 0
    # Only the finest steps have what follows, and models only within the last minute.
    ended_tokens: int = 0
    """Generated tokens of the requests that ended."""
    durations: Counter[int] = field(default_factory=Counter)
    """Number of requests that were served by bin of their time."""
    models: dict[str, _ModelCounts] = field(default_factory=dict)


@dataclass(slots=True)
class _ModelCounts:
    requests: int = 0
    errors: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One step as a chart shows it."""

    age_s: float
    """From the middle of the step until now."""
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    served_per_s: float
    failed_per_s: float
    first_token_p50_s: float | None
    """None if there was no first token."""
    first_token_p95_s: float | None
    running: int
    waiting: int


class LoadHistory:
    """Keeps the steps of all ranges."""

    def __init__(self, now: Callable[[], float] = now_s) -> None:
        """`now`: monotonic seconds."""
        self._now = now
        self._begin_s = now()
        self._steps: dict[str, deque[_Step]] = {
            name: deque(maxlen=each.num_steps + 1) for name, each in RANGES.items()
        }
        self._num_generated = 0
        """Tokens since the last sample."""

    async def run(self, load: Callable[[], tuple[int, int]]) -> None:
        """Sample the running and waiting requests until it is cancelled."""
        while True:
            self.sample(*load())
            await asyncio.sleep(SAMPLE_S)

    def sample(self, running: int, waiting: int) -> None:
        """Record how many requests run and wait now, and the tokens since the last sample."""
        for step in self._current():
            step.running = max(step.running, running)
            step.waiting = max(step.waiting, waiting)
            step.generated_tokens += self._num_generated
        self._num_generated = 0

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self._num_generated += num_tokens

    def first_token(self, after_s: float) -> None:
        """Note that a request got its first token after `after_s` seconds."""
        for step in self._current():
            step.first_tokens[_bin_of(after_s)] += 1

    def ended(
        self,
        outcome: str,
        model: str = "",
        *,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        duration_s: float = 0.0,
    ) -> None:
        """A request ended, or was refused.

        Args:
            outcome: `OK`, `CANCELLED`, or why it failed or was refused.
            model: empty if it was refused before its model was known.
        """
        is_failure = outcome not in (OK, CANCELLED)
        for step in self._current():
            step.requests += 1
            step.served += outcome == OK
            step.prompt_tokens += prompt_tokens
            if is_failure:
                step.failures[outcome] += 1
        finest = self._steps[_FINEST][-1]
        finest.ended_tokens += generated_tokens
        if outcome == OK:
            finest.durations[_bin_of(duration_s)] += 1
        if model and (model in finest.models or len(finest.models) < MAX_NAMES):
            counts = finest.models.setdefault(model, _ModelCounts())
            counts.requests += 1
            counts.errors += is_failure
            counts.generated_tokens += generated_tokens

    def last_minute(self, tenant: str | None = None) -> RecentLoad:
        """The summary of the last minute, in whole steps.

        Args:
            tenant: whose adapters are listed as models; None = those of all, and bases.
        """
        now_s, step_s = self._now(), RANGES[_FINEST].step_s
        oldest = int(now_s // step_s) - _RECENT_STEPS + 1
        steps = [step for step in self._steps[_FINEST] if step.number >= oldest]
        first_tokens = _sum(step.first_tokens for step in steps)
        durations = _sum(step.durations for step in steps)
        return RecentLoad(
            window_s=now_s - max(oldest * step_s, self._begin_s),
            requests=sum(step.requests for step in steps),
            failures=dict(_sum(step.failures for step in steps)),
            prompt_tokens=sum(step.prompt_tokens for step in steps),
            generated_tokens=sum(step.ended_tokens for step in steps),
            first_token_p50_s=_percentile(first_tokens, 0.5) or 0.0,
            first_token_p95_s=_percentile(first_tokens, 0.95) or 0.0,
            duration_p50_s=_percentile(durations, 0.5) or 0.0,
            duration_p95_s=_percentile(durations, 0.95) or 0.0,
            models=_models(steps, "" if tenant is None else f"{tenant}/"),
        )

    def points(self, name: str) -> list[Point]:
        """The steps of a range, oldest first, as far as the gateway was running."""
        now_s, step_s = self._now(), RANGES[name].step_s
        kept = {step.number: step for step in self._kept(name)}
        last = int(now_s // step_s)
        first = max(last - RANGES[name].num_steps + 1, int(self._begin_s // step_s))
        return [
            self._point(kept.get(number) or _Step(number), step_s, now_s)
            for number in range(first, last + 1)
        ]

    def failures(self, name: str) -> list[tuple[str, int]]:
        """Failed and refused requests of a range by reason, most frequent first."""
        total = _sum(step.failures for step in self._kept(name))
        return sorted(total.items(), key=lambda item: (-item[1], item[0]))[:MAX_REASONS]

    def _kept(self, name: str) -> list[_Step]:
        oldest = int(self._now() // RANGES[name].step_s) - RANGES[name].num_steps + 1
        return [step for step in self._steps[name] if step.number >= oldest]

    def _current(self) -> Iterable[_Step]:
        """The step of this moment, of each range. Mutates: begins it."""
        now_s = self._now()
        for name, steps in self._steps.items():
            number = int(now_s // RANGES[name].step_s)
            if not steps or steps[-1].number != number:
                steps.append(_Step(number))
                if name == _FINEST and len(steps) > _RECENT_STEPS:
                    steps[-_RECENT_STEPS - 1].models.clear()
            yield steps[-1]

    def _point(self, step: _Step, step_s: float, now_s: float) -> Point:
        begin_s = max(step.number * step_s, self._begin_s)
        end_s = min((step.number + 1) * step_s, now_s)
        # A step that has just begun is too short for a rate.
        lasted_s = max(end_s - begin_s, SAMPLE_S)
        return Point(
            age_s=now_s - (begin_s + end_s) / 2,
            prompt_tokens_per_s=step.prompt_tokens / lasted_s,
            generated_tokens_per_s=step.generated_tokens / lasted_s,
            served_per_s=step.served / lasted_s,
            failed_per_s=step.failures.total() / lasted_s,
            first_token_p50_s=_percentile(step.first_tokens, 0.5),
            first_token_p95_s=_percentile(step.first_tokens, 0.95),
            running=step.running,
            waiting=step.waiting,
        )


def _models(steps: Sequence[_Step], prefix: str) -> tuple[ModelLoad, ...]:
    """The models whose names begin with `prefix`, those with most tokens first."""
    total: dict[str, _ModelCounts] = {}
    for step in steps:
        for model, counts in step.models.items():
            if not model.startswith(prefix):
                continue
            found = total.setdefault(model, _ModelCounts())
            found.requests += counts.requests
            found.errors += counts.errors
            found.generated_tokens += counts.generated_tokens
    loads = [ModelLoad(m, c.requests, c.errors, c.generated_tokens) for m, c in total.items()]
    loads.sort(key=lambda load: (-load.generated_tokens, -load.requests, load.model))
    return tuple(loads[:MAX_MODELS])


def _sum(counters: Iterable[Counter[T]]) -> Counter[T]:
    total = Counter[T]()
    for counter in counters:
        total.update(counter)
    return total


def _bin_of(seconds: float) -> int:
    return math.floor(math.log(max(seconds, 1e-6)) / _BIN)


def _percentile(bins: Counter[int], share: float) -> float | None:
    """The middle of a percentile's bin, which is within 5 percent; None without counts."""
    wanted, so_far = math.ceil(share * bins.total()), 0
    for time_bin in sorted(bins):
        so_far += bins[time_bin]
        if so_far >= wanted:
            return math.exp((time_bin + 0.5) * _BIN)
    return None
