"""Statistics of the last minute: rates, percentiles, failures and the models in use."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraplex.api.load import ModelLoad, RecentLoad
from loraplex_services.gateway.clock import now_s
from loraplex_services.gateway.pipeline.history import LoadHistory

WINDOW_S = 60.0
MAX_ENTRIES = 50_000
"""Most requests and first tokens that are kept; more of them shorten the window."""
MAX_MODELS = 100
OK, CANCELLED = "ok", "cancelled"


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that ended or was refused."""

    at_s: float
    outcome: str
    model: str = ""
    """Empty if it was refused before its model was known."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    duration_s: float = 0.0

    @property
    def is_failure(self) -> bool:
        """Neither served nor given up by its client."""
        return self.outcome not in (OK, CANCELLED)


class RecentRequests:
    """Keeps the requests of the window."""

    def __init__(self, now: Callable[[], float] = now_s) -> None:
        self._now = now
        self._begin_s = now()
        self.history = LoadHistory(now)
        self._ended: deque[Ended] = deque(maxlen=MAX_ENTRIES)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_ENTRIES)
        """Time and duration of each first token, in seconds."""

    def first_token(self, after_s: float) -> None:
        """A request got its first token."""
        self._first_tokens.append((self._forget_older(), after_s))
        self.history.first_token(after_s)

    def ended(
        self,
        outcome: str,
        model: str = "",
        *,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        duration_s: float = 0.0,
    ) -> None:
        """A request ended, or was refused."""
        at_s = self._forget_older()
        entry = Ended(at_s, outcome, model, prompt_tokens, generated_tokens, duration_s)
        self._ended.append(entry)
        failure = entry.outcome if entry.is_failure else ""
        self.history.ended(failure, entry.outcome == OK, prompt_tokens)

    def load(self) -> RecentLoad:
        """The summary now. Mutates: forgets what is older than the window."""
        at_s = self._forget_older()
        ended = list(self._ended)
        first_tokens = _percentiles([seconds for _, seconds in self._first_tokens])
        durations = _percentiles([e.duration_s for e in ended if e.outcome == OK])
        return RecentLoad(
            window_s=min(at_s - self._begin_s, WINDOW_S),
            requests=len(ended),
            failures=dict(Counter(entry.outcome for entry in ended if entry.is_failure)),
            prompt_tokens=sum(entry.prompt_tokens for entry in ended),
            generated_tokens=sum(entry.generated_tokens for entry in ended),
            first_token_p50_s=first_tokens[0],
            first_token_p95_s=first_tokens[1],
            duration_p50_s=durations[0],
            duration_p95_s=durations[1],
            models=_models(ended),
        )

    def _forget_older(self) -> float:
        """Forget what is older than the window. Returns the time now."""
        at_s = self._now()
        while self._ended and self._ended[0].at_s < at_s - WINDOW_S:
            self._ended.popleft()
        while self._first_tokens and self._first_tokens[0][0] < at_s - WINDOW_S:
            self._first_tokens.popleft()
        return at_s


def _models(ended: Sequence[Ended]) -> tuple[ModelLoad, ...]:
    requests, errors, tokens = Counter[str](), Counter[str](), Counter[str]()
    for entry in ended:
        if entry.model:
            requests[entry.model] += 1
            errors[entry.model] += entry.is_failure
            tokens[entry.model] += entry.generated_tokens
    most = sorted(requests, key=lambda model: (-tokens[model], -requests[model], model))
    return tuple(
        ModelLoad(model, requests[model], errors[model], tokens[model])
        for model in most[:MAX_MODELS]
    )


def _percentiles(values: list[float]) -> tuple[float, float]:
    """Median and 95th percentile, of the values that occurred; 0 without any."""
    if not values:
        return 0.0, 0.0
    values.sort()
    at = [math.ceil(share * len(values)) - 1 for share in (0.5, 0.95)]
    return values[at[0]], values[at[1]]
