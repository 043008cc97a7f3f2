"""A sequential test of paired differences, which may be looked at after every pair.

It bets. A stake of 1 is bet on differences above the margin: it grows where differences are higher
and shrinks where they are lower. If their mean is no higher than the margin, the stake ever reaches
1 / LEVEL with a probability of at most LEVEL (Ville's inequality), whatever the distribution of
differences from -1 to 1. A second stake is bet the other way.

Sources: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, 2024.
For dividing a stake among several bets: Cover, Universal portfolios, 1991.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

MIN_PAIRS = 50
"""Pairs before the first decision: the first requests often come from one caller, and are alike."""
LEVEL = 0.01
"""Probability of a wrong decision over all looks."""
BETS = (0.2, 0.4, 0.6, 0.8, 0.99)
"""Parts of a stake that are lost if the largest difference goes against the bet. A fifth of the
stake follows each: the best one depends on how many answers differ at all."""


class Outcome(enum.StrEnum):
    """The result of the pairs so far."""

    ACCEPTED = "accepted"
    """Its mean difference is above the threshold: it is no worse than is tolerated."""
    REJECTED = "rejected"
    UNDECIDED = "undecided"


def _stakes() -> list[float]:
    return [1 / len(BETS)] * len(BETS)


@dataclass(slots=True)
class PairedTest:
    """Decides whether the mean of differences lies above or below `-margin`.

    A difference counts as at most 1 either way, and as -1 if it is not a number.
    """

    margin: float
    """How much worse the candidate may be, below 1."""
    num_pairs: int = 0
    mean: float = 0.0
    _squares: float = 0.0
    """Sum of squared deviations from the mean, by Welford's algorithm."""
    _for: list[float] = field(default_factory=_stakes)
    """The rest of the stakes that were bet on the candidate, in the order of `BETS`."""
    _against: list[float] = field(default_factory=_stakes)

    def add(self, difference: float) -> None:
        """One more pair: the candidate's score less the other's. Mutates: everything but margin."""
        # In this order of arguments, NaN becomes -1.
        counted = max(-1.0, min(difference, 1.0))
        self.num_pairs += 1
        delta = counted - self.mean
        self.mean += delta / self.num_pairs
        self._squares += delta * (counted - self.mean)
        gain = counted + self.margin
        for index, bet in enumerate(BETS):
            self._for[index] *= 1 + bet * gain / (1 - self.margin)
            self._against[index] *= 1 - bet * gain / (1 + self.margin)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, as a description: decisions do not depend on it. Infinite
        at first."""
        if self.num_pairs < 2:
            return math.inf
        return math.sqrt(self._squares / (self.num_pairs - 1) / self.num_pairs)

    @property
    def outcome(self) -> Outcome:
        """The result of the pairs so far."""
        if self.num_pairs < MIN_PAIRS:
            return Outcome.UNDECIDED
        if sum(self._for) >= 1 / LEVEL:
            return Outcome.ACCEPTED
        if sum(self._against) >= 1 / LEVEL:
            return Outcome.REJECTED
        return Outcome.UNDECIDED
