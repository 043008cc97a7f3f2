"""How long requests run once they have a place, learnt from those that did: moving means. Pure."""

from __future__ import annotations

_NEW_SHARE = 0.1
"""Weight of the newest request."""
_MARGIN = 1.15
"""Over the means: who is let in should be done in time."""
_DEVIATIONS = 2.0


class RunTimes:
    """Foretells an answer's time from its first token, its pace and its length.

    A length is taken as the mean and two mean deviations, as TCP takes a round trip's time
    (Jacobson, Congestion Avoidance and Control): of answers as long as each other that is their
    length, of others more than most have.
    """

    def __init__(self) -> None:
        self._first_s = 0.0
        self._token_s = 0.0
        self._num_tokens = 0.0
        self._deviation = 0.0

    def observe_pace(self, first_s: float, token_s: float) -> None:
        """A request ended whose first token took `first_s` from its place, and others `token_s`."""
        self._first_s = _mean(self._first_s, first_s)
        self._token_s = _mean(self._token_s, token_s)

    def observe_length(self, num_tokens: float) -> None:
        """An answer came whole."""
        if self._num_tokens:
            apart = abs(num_tokens - self._num_tokens)
            self._deviation += _NEW_SHARE * (apart - self._deviation)
        self._num_tokens = _mean(self._num_tokens, num_tokens)

    def run_s(self, min_tokens: int, max_tokens: int, step_s: float) -> float:
        """Seconds for an answer of so many tokens, whose pace is `step_s` until one was seen.

        0 = unknown. Lengths that nobody has seen yet are taken as `min_tokens`.
        """
        length = self._num_tokens + _DEVIATIONS * self._deviation
        length = min(max(length, min_tokens), max_tokens)
        if not self._token_s:
            return step_s * length
        return _MARGIN * (self._first_s + self._token_s * length)


def _mean(old: float, new: float) -> float:
    return old + _NEW_SHARE * (new - old) if old else new
