"""How long requests run once they have a place, learnt from those that did: moving means. Pure."""

from __future__ import annotations

_NEW_SHARE = 0.1
"""Weight of the newest request."""
_DEVIATIONS_OF_LENGTH, _DEVIATIONS_OF_TIME = 2.0, 3.0
_FIRST_DEVIATION = 0.05
"""Of times, as a share of what was foretold, until it is learnt."""


class RunTimes:
    """Foretells an answer's time from its first token, its pace and its length.

    Length and time are taken as the mean and some mean deviations, as TCP takes a round trip's time
    (Jacobson, Congestion Avoidance and Control): where all are alike that is what each takes, else
    what nearly all take at most.
    """

    def __init__(self) -> None:
        self._first_s = 0.0
        self._token_s = 0.0
        self._time_deviation = _FIRST_DEVIATION
        self._num_tokens = 0.0
        self._length_deviation = 0.0

    def observe_pace(self, first_s: float, token_s: float, num_tokens: float) -> None:
        """A request ended whose first token took `first_s` from its place, and others `token_s`."""
        if self._token_s:
            foretold_s = self._first_s + self._token_s * num_tokens
            apart = abs((first_s + token_s * num_tokens) / foretold_s - 1.0)
            self._time_deviation += _NEW_SHARE * (apart - self._time_deviation)
        self._first_s = _mean(self._first_s, first_s)
        self._token_s = _mean(self._token_s, token_s)

    def observe_length(self, num_tokens: float) -> None:
        """An answer came whole."""
        if self._num_tokens:
            apart = abs(num_tokens - self._num_tokens)
            self._length_deviation += _NEW_SHARE * (apart - self._length_deviation)
        self._num_tokens = _mean(self._num_tokens, num_tokens)

    def run_s(self, min_tokens: int, max_tokens: int, step_s: float) -> float:
        """Seconds for an answer of so many tokens, whose pace is `step_s` until one was seen.

        0 = unknown. Lengths that nobody has seen yet are taken as `min_tokens`.
        """
        length = self._num_tokens + _DEVIATIONS_OF_LENGTH * self._length_deviation
        length = min(max(length, min_tokens), max_tokens)
        mean_s = self._first_s + (self._token_s or step_s) * length
        return mean_s * (1.0 + _DEVIATIONS_OF_TIME * self._time_deviation)


def _mean(old: float, new: float) -> float:
    return old + _NEW_SHARE * (new - old) if old else new
