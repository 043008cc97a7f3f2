"""Estimates how long a request will run, from the requests that ran before. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_NEW_SHARE = 0.1
"""Weight of the newest request in moving means."""
_NEW_ERROR_SHARE = 0.02
"""Weight of a new prediction error: requests of one batch have similar errors."""
_DEVIATIONS_OF_LENGTH = 2.0
_DEVIATIONS_OF_TIME = 3.0
"""Number of mean deviations by which an estimate exceeds the mean."""
_FIRST_ERROR = 0.05
"""Relative prediction error that is assumed before the first prediction was checked."""


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Latency of one request, or the mean over several."""

    first_s: float = 0.0
    """Seconds from admission to the first token."""
    token_s: float = 0.0
    """Seconds between two tokens; 0 = not known."""

    def run_s(self, num_tokens: float) -> float:
        """Seconds until `num_tokens` tokens are generated."""
        return self.first_s + self.token_s * num_tokens


class RunTimeEstimator:
    """Predicts the time of an answer from the latencies and lengths of earlier ones.

    The estimates are the mean plus a few mean deviations, as TCP estimates round-trip times
    (Jacobson, Congestion Avoidance and Control). If all requests are alike, that is what each of
    them takes; otherwise nearly all take less.
    """

    def __init__(self) -> None:
        self.latency = RequestLatency()
        """Moving mean."""
        self._error = _FIRST_ERROR
        """Moving mean of the relative prediction error."""
        self._num_tokens = 0.0
        self._length_deviation = 0.0

    def observe_latency(
        self, seen: RequestLatency, num_tokens: float, predicted: RequestLatency
    ) -> None:
        """Record a request that ended; `predicted` was the mean when it began."""
        if predicted.token_s:
            error = abs(seen.run_s(num_tokens) / predicted.run_s(num_tokens) - 1.0)
            self._error += _NEW_ERROR_SHARE * (error - self._error)
        self.latency = RequestLatency(
            _mean(self.latency.first_s, seen.first_s), _mean(self.latency.token_s, seen.token_s)
        )

    def observe_length(self, num_tokens: float) -> None:
        """Record the length of a complete answer."""
        if self._num_tokens:
            apart = abs(num_tokens - self._num_tokens)
            self._length_deviation += _NEW_SHARE * (apart - self._length_deviation)
        self._num_tokens = _mean(self._num_tokens, num_tokens)

    def run_s(self, min_tokens: int, max_tokens: int, step_s: float) -> float:
        """Estimated seconds for an answer of `min_tokens` to `max_tokens`; 0 = not known.

        Until a request was measured, `step_s` is the time per token and `min_tokens` the length.
        """
        length = self._num_tokens + _DEVIATIONS_OF_LENGTH * self._length_deviation
        latency = self.latency if self.latency.token_s else RequestLatency(0.0, step_s)
        run_s = latency.run_s(min(max(length, min_tokens), max_tokens))
        return run_s * (1.0 + _DEVIATIONS_OF_TIME * self._error)


def _mean(old: float, new: float) -> float:
    return old + _NEW_SHARE * (new - old) if old else new
