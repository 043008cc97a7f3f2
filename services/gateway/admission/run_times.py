"""How long requests run once they have a place, learnt from those that did: moving means. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_NEW_SHARE = 0.1
"""Weight of the newest request in means."""
_NEW_ERROR_SHARE = 0.02
"""The same in how far off times were: neighbours in a batch are off alike."""
_DEVIATIONS_OF_LENGTH, _DEVIATIONS_OF_TIME = 2.0, 3.0
_FIRST_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class RunPace:
    """Of one request, or in the mean."""

    first_s: float = 0.0
    """From its place to the first token."""
    token_s: float = 0.0
    """Between two tokens; 0 = not known."""

    def run_s(self, num_tokens: float) -> float:
        """Seconds for so many tokens."""
        return self.first_s + self.token_s * num_tokens


class RunTimes:
    """Foretells an answer's time from its first token, its pace and its length.

    Length and time are taken as the mean and some mean deviations, as TCP takes a round trip's time
    (Jacobson, Congestion Avoidance and Control): where all are alike that is what each takes, else
    what nearly all take at most.
    """

    def __init__(self) -> None:
        self.pace = RunPace()
        """In the mean; as of now."""
        self._error = _FIRST_ERROR
        """How far off it was, as a share."""
        self._num_tokens = 0.0
        self._length_deviation = 0.0

    def observe_pace(self, seen: RunPace, num_tokens: float, foretold: RunPace) -> None:
        """A request ended; `foretold` was the mean when it began."""
        if foretold.token_s:
            error = abs(seen.run_s(num_tokens) / foretold.run_s(num_tokens) - 1.0)
            self._error += _NEW_ERROR_SHARE * (error - self._error)
        self.pace = RunPace(
            _mean(self.pace.first_s, seen.first_s), _mean(self.pace.token_s, seen.token_s)
        )

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
        pace = self.pace if self.pace.token_s else RunPace(0.0, step_s)
        run_s = pace.run_s(min(max(length, min_tokens), max_tokens))
        return run_s * (1.0 + _DEVIATIONS_OF_TIME * self._error)


def _mean(old: float, new: float) -> float:
    return old + _NEW_SHARE * (new - old) if old else new
