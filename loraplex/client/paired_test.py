"""A sequential test of paired differences, which may be looked at after every pair.

A confidence sequence bounds the mean of all differences after any number of pairs, so that a
decision may fall as soon as the evidence suffices. The bound is the one-sided normal mixture of
Howard, Ramdas, McAuliffe and Sekhon (2021), "Time-uniform, nonparametric, nonasymptotic confidence
sequences", with the sample variance in place of a known one (Waudby-Smith, Arbour, Sinha, Kennedy
and Ramdas, 2024).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

MIN_PAIRS = 50
"""Pairs before the first decision."""
LEVEL = 0.01
"""Probability of a wrong decision over all looks, as far as the sample variance is that of all
pairs. At the margin itself, simulated rare losses of 1 were accepted in 2% of the trials."""
_TUNED_FOR = 400
"""Number of pairs at which the bound is tightest."""


class Outcome(enum.StrEnum):
    """What the pairs so far say about the candidate."""

    ACCEPTED = "accepted"
    """Its mean difference is above the threshold: it is no worse than is tolerated."""
    REJECTED = "rejected"
    UNDECIDED = "undecided"


@dataclass(slots=True)
class PairedTest:
    """Decides whether the mean of differences lies above or below `-margin`."""

    margin: float
    """How much worse the candidate may be."""
    num_pairs: int = 0
    mean: float = 0.0
    _squares: float = 2.0
    """Sum of squared deviations from the mean, by Welford's algorithm. It begins with that of two
    more pairs, of differences 1 and -1: while no pair differs, rare large differences may just not
    have occurred yet."""

    def add(self, difference: float) -> None:
        """One more pair: the candidate's score less the other's. Mutates: all counts."""
        self.num_pairs += 1
        delta = difference - self.mean
        self.mean += delta / self.num_pairs
        self._squares += delta * (difference - self.mean)

    @property
    def radius(self) -> float:
        """Distance from the mean within which the true mean lies on one side, with probability
        1 - LEVEL for all numbers of pairs at once; infinite at the beginning."""
        if self.num_pairs < MIN_PAIRS:
            return math.inf
        odds = 1 / (2 * LEVEL)
        rho = _TUNED_FOR / (2 * math.log(odds) + math.log(1 + 2 * math.log(odds)))
        spread = self.num_pairs + rho
        bound = math.sqrt(2 * spread * math.log(odds * math.sqrt(spread / rho) + 1))
        return bound * math.sqrt(self._squares / (self.num_pairs + 2)) / self.num_pairs

    @property
    def outcome(self) -> Outcome:
        """What the pairs so far say."""
        if self.mean - self.radius > -self.margin:
            return Outcome.ACCEPTED
        if self.mean + self.radius < -self.margin:
            return Outcome.REJECTED
        return Outcome.UNDECIDED
