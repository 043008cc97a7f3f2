"""How much work the workers get ahead of its first token, learnt from how fast those come. Pure.

Workers need a little more than they can start, so that a place that becomes free is taken at once;
what is beyond that waits there, where this gateway can no longer order, refuse or move it. So the
room is what gets its first token in a fraction of a second, by Little's law, and never so little
that a worker runs dry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TARGET_S = 0.05
"""A request waits at a worker about so long while others wait here."""
TARGET_STEPS = 3.0
"""But for so many steps where they are long: first tokens come in steps, and a bound below a step's
worth would shrink on its own account."""
LEAST_TOKENS_PER_WORKER, MOST_TOKENS_PER_WORKER = 256.0, 8192.0
_SMOOTHING = 0.5


@dataclass(frozen=True, slots=True)
class ReadyWorkers:
    """Those that take requests."""

    num: int
    step_s: float = 0.0
    """Of the slowest."""


class AheadRoom:
    """The room of all workers together, in prompt tokens."""

    def __init__(self) -> None:
        self._rate = math.inf
        """Prompt tokens a second that get their first token."""
        self._begin_s = 0.0
        self._num_tokens = 0

    def begin(self, now_s: float) -> None:
        """Requests begin to wait for room: from now on the rate is what the workers can do."""
        self._begin_s, self._num_tokens = now_s, 0

    def started(self, num_tokens: int, now_s: float, workers: ReadyWorkers) -> None:
        """Requests of so many prompt tokens have their first token while others wait here."""
        self._num_tokens += num_tokens
        elapsed_s = now_s - self._begin_s
        if elapsed_s < _target_s(workers):
            return
        rate = self._num_tokens / elapsed_s
        if math.isinf(self._rate):
            self._rate = rate
        self._rate += _SMOOTHING * (rate - self._rate)
        self.begin(now_s)

    def tokens(self, workers: ReadyWorkers) -> float:
        """The room."""
        num = max(workers.num, 1)
        room = max(self._rate * _target_s(workers), LEAST_TOKENS_PER_WORKER * num)
        return min(room, MOST_TOKENS_PER_WORKER * num)


def _target_s(workers: ReadyWorkers) -> float:
    return max(TARGET_S, TARGET_STEPS * workers.step_s)
